"""Batch jobs: input files in, shards of output rows out, each row exactly once, however often the job is killed.

`config` is the configuration of a job, `input` splits its files into shards, `store` is its directory, `job` its spec,
its state and its shards, `drive` feeds an engine, `worker` is one process of the job, and `__main__` the command.
"""
