"""Long sampling jobs: rows of files in, shards of rows out, exactly once, however often the job is killed.

`config` says what a job is, `plan` divides its input into shards, `store` keeps what must outlive the process, `job`
knows whether a job may go on, `layout` says what is written for a row, `shard` collects and commits the rows of one
shard, `drive` feeds an engine.
"""
