"""Responses of a server to requests for its configuration, with secrets that nothing may store."""

HIDDEN = "sk-s3cr3t"
VERSION = {"version": "0.32.0"}
CARD = {"id": "demo", "object": "model", "root": "/models/demo", "parent": None, "max_model_len": 4096}
ADAPTER = {"id": "sql", "object": "model", "root": "/loras/sql", "parent": "demo"}
MODELS = {"object": "list", "data": [CARD, ADAPTER]}
SERVER_INFO = {
    "vllm_config": {
        "model_config": {"model": "demo", "max_model_len": 4096, "hf_token": HIDDEN},
        "cache_config": {
            "block_size": 16,
            "gpu_memory_utilization": 0.92,
            "cache_dtype": "fp8",
            "num_gpu_blocks": 3000,
            "num_gpu_blocks_override": None,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": None,
            "kv_offloading_size": None,
        },
        "scheduler_config": {
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 256,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "long_prefill_token_threshold": 0,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "async_scheduling": True,
            "max_num_active_seqs": None,
        },
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
        "kv_transfer_config": {"kv_role": "kv_consumer", "kv_connector_extra_config": {"key": HIDDEN}},
        "speculative_config": {"num_speculative_tokens": 3, "model": HIDDEN},
        "lora_config": None,
    },
    "vllm_env": {"VLLM_API_KEY": HIDDEN, "max_num_seqs": 7},
    "system_env": {"HF_TOKEN": HIDDEN},
}
INFO_FACTS = {
    "max_model_len": 4096,
    "block_size": 16,
    "gpu_memory_utilization": 0.92,
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": True,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 4,
    "role": "decode",
    "num_speculative_tokens": 3,
}
WHOLE = {
    "/version": VERSION,
    "/v1/models": MODELS,
    "/server_info?config_format=json": SERVER_INFO,
}
PATHS = list(WHOLE)
