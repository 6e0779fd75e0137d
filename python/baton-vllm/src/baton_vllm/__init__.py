"""Live migration for stock vLLM: a KV connector and the replica's side of the Baton migration protocol."""
