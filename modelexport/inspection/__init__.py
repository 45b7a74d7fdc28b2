"""Reading back: the contents of a checkpoint, its errors, its report and its card."""
