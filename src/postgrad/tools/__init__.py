"""Commands beside training: evaluate, export, checkpoints, pages, dry runs, chat, serving."""
