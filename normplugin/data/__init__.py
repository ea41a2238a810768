"""Text to training data for fairseq and Megatron-Core: one tokenizer, one encoding pass.

Read the modules in this order: `corpus` (what a document is), `parallel` (translation pairs),
`labelled` (classification), `tokenizer` (sentencepiece), `vocabulary` (ids in both frameworks),
`encode` (the pass), `fairseq_format` and `megatron_format` (the files), `manifest` (the record),
`output` (nothing half-written), `prepare` (all of it in order), `inputs` and `command` (the command
line), `units` (perplexities).
"""
