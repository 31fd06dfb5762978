"""What `prepare` gives back, and how it works: pairs of model and optimizer, loaders, and what they share."""
