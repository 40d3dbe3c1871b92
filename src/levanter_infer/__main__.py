"""`python -m levanter_infer COMMAND`: what the console script `levanter-infer` runs."""

from levanter_infer.cli import run

if __name__ == "__main__":
    run()
