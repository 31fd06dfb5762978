"""Engine `spark`: workers in the executors of a Spark cluster, as one barrier stage."""
