"""Training schemes against the framework's own model, each run with the framework's own trainer.

Read the modules in this order: `command` (the command line and the order of it all), `arms` (the
vocabulary), `plan` (what all runs share, one job per run), `folder` (where it is kept),
`frameworks` (what a framework must be able to do; ``*_arms`` how it trains, ``*_record`` what it
leaves behind), `process` and `run` (one child process, what it ends as, how it goes on), `record`
(curves), `fair` (may runs be ranked), `collect`, `verdict`, `cautions` and `summary` (the numbers),
`results` (their shape and their file), `report` (the table and ``report.md``), `html` (the page).

Another framework is another pair of ``*_arms`` and ``*_record``; the rest knows no framework.
"""
