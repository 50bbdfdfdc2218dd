"""Models and data of the Hugging Face hub: names and commits, files on this machine, and pushes."""
