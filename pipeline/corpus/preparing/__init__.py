"""From records to a corpus, from the bottom up: each module imports only those named before it.

`job` is the recipe, and `block` makes examples of consecutive records. `inspect` looks at a sample
of records, and `work` makes the parts of a shard of them. `processes` runs work. Users call
`preparation`, and `pairs` for inputs and targets.
"""
