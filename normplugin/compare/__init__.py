"""Training schemes against the upstream baseline, each with the framework's own trainer.

Read the modules in this order: `plan` (arms, settings, what identifies a run), `fairseq_arms` (how
fairseq trains an arm, checked before anything starts), `run` (one child process, its progress, and
the result that a later run reuses), `fairseq_record` (what a finished run says about itself),
`collect` (may the runs be ranked, and in which numbers), `report` (the table and the files),
`command` (the command line and the order of it all).

Another framework is another pair of ``*_arms`` and ``*_record``; the rest knows no framework.
"""
