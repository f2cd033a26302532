"""Android phones over adb: pushing what Genie loads, and running it there."""
