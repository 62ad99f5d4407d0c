"""Tasks and judgements: the records, the embedded corpus, a user's own collection, and the order of training tasks."""
