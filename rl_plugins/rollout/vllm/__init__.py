"""vLLM as a rollout engine: the actor that owns it, the client that training ranks hold, what is registered with it.

No other room imports vLLM, and here only the process of the actor does.
"""
