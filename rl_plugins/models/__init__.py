"""Language models: loading, adapters, log-probs of responses, scalar heads, packed rows, and export."""
