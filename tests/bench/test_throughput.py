from levanter_infer.bench.throughput import decoding


def test_decoding_is_what_the_longer_call_takes_beyond_the_shorter():
    found = decoding([(1.0, 1.5), (1.0, 1.25), (2.0, 3.0)], batch=4, output=10)
    assert found["decode_tokens_per_s"] == {"median": 80.0, "min": 40.0, "max": 160.0, "sd": 61.1, "runs": 3}
    assert found["decode_step_ms"] == {"median": 50.0, "min": 25.0, "max": 100.0, "sd": 38.188, "runs": 3}


def test_a_difference_lost_in_the_noise_is_no_rate():
    assert decoding([(1.0, 1.5), (1.0, 0.9)], batch=4, output=1) == dict.fromkeys(
        ("decode_tokens_per_s", "decode_step_ms")
    )
