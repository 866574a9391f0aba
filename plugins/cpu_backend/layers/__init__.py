"""The layers of the model on CPU: what MindFormers builds from operators that CPU has not."""
