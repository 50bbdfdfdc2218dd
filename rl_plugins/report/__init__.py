"""A run after it has ended: its figures, its learning curve, and all of it on one page that needs nothing else."""
