"""What a device must do for the library to be right on it."""
