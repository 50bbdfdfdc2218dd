"""vLLM as a rollout engine: the actor with the engine, the client on training ranks, and plug-ins for vLLM.

No other room imports vLLM. In this room only the actor's process does.
"""
