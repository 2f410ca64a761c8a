"""Each fact comes from the first source that knows it, and of an argument line nothing else is kept."""

from exporter.analysis.server_facts import ServerFacts, merge
from exporter.vllm.exposition import CacheConfig

HIDDEN = "sk-s3cr3t"

LABELS = CacheConfig(
    block_size=16,
    num_gpu_blocks=1000,
    num_gpu_blocks_override=300,
    kv_cache_memory_bytes=1 << 30,
    gpu_memory_utilization=0.92,
    cache_dtype="auto",
    enable_prefix_caching=True,
    kv_offloading_size=2.0,
)


# Sources


def test_nothing_is_known_of_nothing():
    """No default of vLLM's is made up: it depends on version and GPU."""
    assert merge() == ServerFacts({}, {})
    assert merge().number("max_num_seqs") is None


def test_each_fact_comes_from_the_first_source_that_knows_it():
    """Configuration, argument line, server_info, v1/models, labels; each says which it was."""
    facts = merge(
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "tensor_parallel_size": 2},
        {"max_num_seqs": 3, "tensor_parallel_size": 3, "watermark": 0.3},
        {"max_model_len": 4},
        CacheConfig(block_size=5),
    )
    assert facts.facts == {
        "max_num_seqs": 1,
        "tensor_parallel_size": 2,
        "watermark": 0.3,
        "max_model_len": 4,
        "block_size": 5,
    }
    assert facts.source == {
        "max_num_seqs": "configuration",
        "tensor_parallel_size": "argument line",
        "watermark": "server_info",
        "max_model_len": "v1/models",
        "block_size": "cache_config_info",
    }


def test_server_info_goes_before_the_list_of_models():
    """The same fact from both: the source that tells more wins."""
    facts = merge(server_info={"max_model_len": 4096}, models={"max_model_len": 2048})
    assert (facts.number("max_model_len"), facts.source["max_model_len"]) == (4096, "server_info")


def test_the_list_of_models_tells_one_fact_only():
    """Whatever else is handed over under its name."""
    assert merge(models={"max_model_len": 2048, "max_num_seqs": 8}).facts == {"max_model_len": 2048}


def test_labels_tell_what_the_cache_was_made_with():
    """By the names of the flags."""
    assert merge(cache_labels=LABELS).facts == {
        "block_size": 16,
        "num_gpu_blocks_override": 300,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.92,
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": True,
        "kv_offloading_size": 2.0,
    }


def test_a_label_that_makes_no_sense_is_unknown():
    """A body may hold anything."""
    assert merge(cache_labels=CacheConfig(gpu_memory_utilization=7.0, cache_dtype="a b")).facts == {}


def test_auto_gives_way_to_what_the_server_made_of_it():
    """It says that the server decides; but it is all that is known where nobody knows better."""
    facts = merge({"kv_cache_dtype": "auto"}, cache_labels=CacheConfig(cache_dtype="fp8_e4m3"))
    assert facts.facts["kv_cache_dtype"] == "fp8_e4m3"
    assert facts.source["kv_cache_dtype"] == "cache_config_info"
    facts = merge({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "auto"}, cache_labels=LABELS)
    assert facts.facts["kv_cache_dtype"] == "auto"
    assert facts.source["kv_cache_dtype"] == "configuration"


def test_a_fact_of_another_type_is_no_number():
    """Neither True nor a word."""
    facts = merge({"enable_prefix_caching": True, "watermark": 0.05, "role": "both"})
    assert [facts.number(name) for name in facts.facts] == [None, 0.05, None]


def test_the_version_has_a_source():
    """As every other fact: the server's own answer, unless the operator says otherwise."""
    answered = merge(version={"vllm_version": "0.26.0"})
    assert answered.facts["vllm_version"] == "0.26.0"
    assert answered.source["vllm_version"] == "version"
