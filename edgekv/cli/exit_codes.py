"""The one place where exceptions become messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from devices import UnknownDeviceError
from edgekv.errors import EdgeKVError

DEBUG_VARIABLE = "EDGEKV_DEBUG"


def exit_code_of(call: Callable[[], None]) -> int:
    """Run a call and say what went wrong in a line on standard error, without a traceback.

    With EDGEKV_DEBUG=1 in the environment the traceback comes too.
    """
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except EdgeKVError as error:
        return _report(str(error), error.exit_code)
    except UnknownDeviceError as error:
        return _report(str(error), 2)
    except OSError as error:
        if error.errno == errno.EPIPE:
            # Whoever read our output has gone; the flush at the interpreter's end must not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        place = "" if error.filename is None else f"{error.filename}: "
        return _report(f"{place}{error.strerror or error}", 1)
    except MemoryError:
        return _report("not enough memory", 1)
    except Exception as error:
        return _report(
            f"{type(error).__name__}: {error}. This is a bug; please report it with the output of "
            f"{DEBUG_VARIABLE}=1 edgekv ...",
            1,
        )
    return 0


def _report(message: str, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exc()
    print(f"edgekv: error: {message}", file=sys.stderr)
    return code
