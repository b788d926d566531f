"""Weights from the trainer's shards to the engine's: layouts, the plan of a refit, its execution. No engine here."""
