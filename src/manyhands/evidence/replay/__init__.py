"""`replay()`: repeat an asynchronous run in one process, in the recorded order. For `cli` and users."""
