"""`python -m levanter_infer.plan`: what a job will need and how fast it can be, before there is a machine for it.

`targets` says what machines have, `job` what is asked for, `figures` what follows from shapes alone, `compiled` (in a
process of its own, `compiler`) what the compiler makes of the job's own programs, `roofline` how fast that can be, and
`search` which smallest change makes a job fit that does not.
"""
