"""Data: who reads which rows (share, feed), and from what (sources)."""
