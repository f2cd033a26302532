"""The decoder as a `.tflite` file, for LiteRT and tflite-runtime, written without TensorFlow."""
