"""Batch jobs: input files in, shards of output rows out, each row exactly once, however often the job is killed.

`config` is the configuration of a job, `input` splits its files into shards, `store` is its directory, `job` its spec
and state, `shard` collects and commits the rows of one shard, `drive` feeds an engine, `worker` is one process of the
job, and `run` the command.
"""
