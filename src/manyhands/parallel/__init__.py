"""One replica over several workers: its model is cut into stages."""
