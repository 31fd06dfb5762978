"""Computing an asynchronous run again, in the order in which it happened."""
