"""Groups: the workers' collectives."""
