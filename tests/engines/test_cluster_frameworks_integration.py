"""Real TensorFlow and real JAX, where they are installed: programs of theirs, which know nothing of manyhands."""

import os
from typing import Any

import numpy as np
import pytest

from manyhands.engines.local.engine import Local

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def descended(rows: Any, targets: Any, weights: Any) -> None:
    """A replica's step of gradient descent, with the mean gradient of all replicas."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((rows @ weights - targets) ** 2)
    gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
    weights.assign_sub(0.5 * gradient)


def fed(cluster: Any) -> tuple[int, list[float]]:
    """Replicas in step, as TensorFlow's own tutorial has it: y = 3.14a + 1.618b, from rows that the run was given; each replica
    meets the other after every batch."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([2, 1]))

    @tf.function
    def step(rows: Any, targets: Any) -> None:
        strategy.run(descended, args=(rows, targets, weights))

    steps = 0
    for rows, targets in cluster.rows(16, epochs=40, drop_remainder=True):
        step(tf.constant(rows), tf.constant(targets))
        steps += 1
    return steps, [float(x) for x in weights.numpy()[:, 0]]


def test_multi_worker_mirrored_strategy(local: Local) -> None:
    pytest.importorskip("tensorflow", reason="needs tensorflow (tensorflow-cpu will do)")
    rows = np.random.default_rng(1234).random((250, 2), np.float32)
    targets = rows @ np.array([[3.14], [1.618]], np.float32)
    values = local.run(fed, workers=1, roles={"chief": 1}, rows=(rows, targets))
    (first,), (second,) = values["chief"], values["worker"]
    assert first == second
    assert first[0] == 40 * (250 // 32)
    assert first[1] == pytest.approx([3.14, 1.618], abs=0.01)


def with_parameter_servers(cluster: Any) -> float | None:
    """TensorFlow 2's: workers and parameter servers serve for ever, the chief says what is done."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.role != "chief":
        tf.distribute.Server(resolver.cluster_spec(), job_name=cluster.role, task_index=cluster.index).join()
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        total = tf.Variable(0.0)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def add() -> None:
        total.assign_add(1.0)

    for _ in range(20):
        coordinator.schedule(add)
    coordinator.join()
    return float(total.numpy())


def test_parameter_servers_are_ended_when_the_chief_is_done(local: Local) -> None:
    pytest.importorskip("tensorflow")
    values = local.run(with_parameter_servers, workers=1, roles={"chief": 1, "ps": 1}, until=("chief",))
    assert values == {"chief": [20.0], "worker": [None], "ps": [None]}


def total_of_ranks(cluster: Any) -> tuple[int, float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    count, own = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(num_processes=count, process_id=own)  # finds the coordinator's address itself
    gathered = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1.0]))
    return jax.process_count(), float(gathered.sum())


def test_jax_finds_all_processes(local: Local) -> None:
    pytest.importorskip("jax")
    assert local.run(total_of_ranks, workers=2) == {"worker": [(2, 3.0), (2, 3.0)]}
