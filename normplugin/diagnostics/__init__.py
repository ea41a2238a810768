"""What happens inside a model while it trains: one definition per quantity, for both frameworks.

    quantities  what is measured, each with its formula
    mapping     where a framework's model keeps what is measured
    tally       sums and maxima of one update, over micro-batches and ranks, read in one transfer
    probe       hooks for one update, and what they feed the tally
    records     JSON lines
    session     which updates are measured, and where the records go

``fairseq_map``, ``fairseq_train`` and ``command`` need fairseq; ``megatron_map`` and
``megatron_train`` need Megatron. Nothing here imports both.
"""
