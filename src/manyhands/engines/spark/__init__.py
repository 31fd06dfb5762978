"""Engine `spark`: workers in the executors of a Spark cluster, as one barrier stage.

Only the catalogue of engines and `manyhands.spark` import this.
"""
