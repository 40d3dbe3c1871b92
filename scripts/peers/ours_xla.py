"""This engine with nothing but XLA's own code, as one side of `run.py`."""

from ours import start
from protocol import serve

if __name__ == "__main__":
    serve(lambda setup: start(setup, matmul="xla", attention="xla"), ("jax", "jaxlib"))
