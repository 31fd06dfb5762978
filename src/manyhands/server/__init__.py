"""The shared, versioned store of parameters."""
