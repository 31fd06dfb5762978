"""Which plan for a model and these workers: what it costs, before it runs."""
