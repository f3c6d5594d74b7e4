"""vLLM prefill and decode workers for kvloop: how to start them, the vLLM plugin, simulated ones, the demo."""
