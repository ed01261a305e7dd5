"""A run's metrics as event files of TensorBoard, read off its output folder."""
