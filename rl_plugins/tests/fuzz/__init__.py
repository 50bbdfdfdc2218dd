"""Random bad input for the functions that check input, in this process, without Ray, engines and training."""
