from kerple.data.layout import ShardLayout


def test_sizes_by_hand() -> None:
    layout = ShardLayout("uint16", run_tokens=1000, runs_per_shard=3)  # 2,000 bytes of payload take 4 blocks of 512
    assert layout.run_bytes == 512 + 2048
    assert layout.shard_bytes(3500, 0) == 3 * 2560 + 1024
    assert layout.shard_bytes(3500, 1) == 512 + 1024 + 1024
    assert (layout.runs(3500), layout.shards(3500), layout.tokens_in_run(3500, 3)) == (4, 2, 500)
    assert layout.member("test", 7) == "test-00000007.u16"
    assert ShardLayout("uint32").member("test", 7) == "test-00000007.u32"
