"""What became of each program, and what is owed to it: the class that an expert would expect of a compiler.

Verdicts are asserted as they stand, so that a program that gets better or worse shows here. `# short` marks those of a
worse class than the one owed.
"""

#: name -> (verdict today, class owed); `catalogue.CLASSES` says what the classes are.
VERDICTS = {
    # masks.py
    "window/window_by_mask": ("window_attention", "operator"),
    "window/window_by_distance": ("window_attention", "operator"),
    "window/window_rows_of_finfo_min": ("copies", "operator"),  # short
    "window/window_by_sdpa": ("window_attention", "operator"),
    "window/window_by_finfo_min": ("window_attention", "operator"),
    "window/window_by_ring": ("dense + copies", "operator"),  # short
    "window/window_by_ring_index_copy": ("dense + copies", "operator"),  # short
    "window/window_by_ring_with_positions": ("dense + copies", "operator"),  # short
    "window/window_by_ring_with_counter": ("dense + copies", "operator"),  # short
    "window/window_by_shift": ("dense + copies", "operator"),  # short
    "window/window_by_roll": ("dense + copies", "operator"),  # short
    "window/window_by_stack": ("loop", "operator"),  # short
    "window/window_by_select_scatter": ("dense + copies", "operator"),  # short
    "window/window_by_gather": ("dense + copies", "operator"),  # short
    "window_per_head/window_per_head": ("dense", "operator"),  # short
    "window_or_full/window_in_half_of_the_heads": ("dense", "operator"),  # short
    "window_and_sinks/sinks_by_mask": ("dense", "operator"),  # short
    "window_and_sinks/sinks_before_a_ring": ("dense + copies", "operator"),  # short
    "window_and_sinks/sinks_in_their_own_cache": ("crash", "operator"),  # short
    "longformer/global_tokens": ("dense", "operator"),  # short
    "longformer/global_tokens_by_rows": ("dense", "operator"),  # short
    "longformer_symmetric/global_queries_too": ("dense", "operator"),  # short
    "bigbird/random_blocks": ("dense", "operator"),  # short
    "strided/strided_from_the_query": ("dense", "dense"),
    "sparse_transformer/strided_and_window": ("dense", "operator"),  # short
    "dilated/dilated_window": ("dense", "operator"),  # short
    "chunked/chunked": ("dense", "operator"),  # short
    "chunked/chunk_buffer": ("dense + copies", "operator"),  # short
    "chunk_and_previous/chunk_and_previous": ("dense", "operator"),  # short
    "block_causal/block_causal": ("dense", "operator"),  # short
    "prefix_lm/prefix_lm": ("dense", "operator"),  # short
    "prefix_lm/prefix_in_the_cache": ("dense + copies", "operator"),  # short
    "documents/documents_closed_over": ("dense", "operator"),  # short
    "documents/documents_in_a_cache": ("dense + copies", "operator"),  # short
    "documents/documents_in_a_cache_finite": ("copies", "operator"),  # short
    "documents/documents_by_start": ("dense", "operator"),  # short
    "documents/documents_by_rows": ("dense + copies", "operator"),  # short
    "documents/documents_by_bias": ("copies", "operator"),  # short
    "documents/documents_by_sdpa": ("dense", "operator"),  # short
    "documents_in_a_window/documents_and_window": ("dense", "operator"),  # short
    "left_padding/padding_nan_to_num": ("dense", "operator"),  # short
    "left_padding/padding_sees_itself": ("dense", "operator"),  # short
    "left_padding/padding_finfo_min": ("copies", "operator"),  # short
    "left_padding/padding_fill_minus_1e9": ("copies", "operator"),  # short
    "left_padding/padding_in_a_cache": ("dense + copies", "operator"),  # short
    "left_padding/padding_by_number": ("dense", "operator"),  # short
    "cross/cross_attention": ("dense", "dense"),
    "cross_padded/cross_attention_padded": ("dense", "dense"),
    "cross_padded/cross_attention_in_the_carry": ("dense", "dense"),
    "self_and_cross/self_and_cross_attention": ("dense + window_attention", "dense"),
    "encoder/no_mask": ("dense", "dense"),
    # recurrences.py
    "linear_attention/linear_by_einsum": ("loop", "parallel"),  # short
    "linear_attention/linear_by_broadcast": ("loop", "parallel"),  # short
    "linear_attention/linear_transposed": ("loop", "parallel"),  # short
    "linear_attention/linear_by_baddbmm": ("loop", "parallel"),  # short
    "linear_attention/linear_by_cache": ("batched", "dense"),
    "linear_attention_normalised/linear_normalised": ("loop", "parallel"),  # short
    "linear_attention_normalised/linear_normalised_by_ones": ("loop", "parallel"),  # short
    "retnet/retention": ("loop", "parallel"),  # short
    "retnet/retention_by_cache": ("batched", "dense"),
    "scalar_decay/scalar_decay": ("loop", "parallel"),  # short
    "scalar_decay_log/scalar_decay_log": ("loop", "parallel"),  # short
    "gla/gated_linear": ("loop", "parallel"),  # short
    "gla/gated_linear_by_diagonal": ("loop", "parallel"),  # short
    "gated_values/hgrn2": ("loop", "parallel"),  # short
    "mlstm/matrix_lstm": ("loop", "parallel"),  # short
    "delta/delta_rule": ("loop", "parallel"),  # short
    "delta/delta_rule_by_matrix": ("loop", "parallel"),  # short
    "gated_delta/gated_delta_rule": ("loop", "parallel"),  # short
    "kda/kimi_delta_rule": ("loop", "parallel"),  # short
    "rwkv7/generalised_delta_rule": ("loop", "parallel"),  # short
    "rwkv6/rwkv6": ("loop", "parallel"),  # short
    "rwkv4/rwkv4": ("loop", "parallel"),  # short
    "mamba/selective_scan": ("loop", "parallel"),  # short
    "mamba/selective_scan_discretised": ("loop", "parallel"),  # short
    "mamba2/state_space_dual": ("loop", "parallel"),  # short
    "diagonal_ssm/complex_decay": ("loop", "parallel"),  # short
    "rg_lru/griffin": ("loop", "parallel"),  # short
    "hgrn/gated_average": ("loop", "parallel"),  # short
    "hgrn/gated_average_by_lerp": ("loop", "parallel"),  # short
    "hgrn/gated_average_by_difference": ("loop", "parallel"),  # short
    "min_gru/min_gru": ("loop", "parallel"),  # short
    "ema/exponential_average": ("loop", "parallel"),  # short
    "ema_corrected/exponential_average_corrected": ("loop", "parallel"),  # short
    "two_averages/two_averages": ("loop", "parallel"),  # short
    "sum/running_sum": ("loop", "parallel"),  # short
    "mean/running_mean": ("loop", "parallel"),  # short
    "mean/running_mean_by_correction": ("loop", "parallel"),  # short
    "mean/running_mean_by_cache": ("batched", "dense"),
    "welford/running_variance": ("loop", "parallel"),  # short
    "max/running_max": ("loop", "parallel"),  # short
    "min/running_min": ("loop", "parallel"),  # short
    "product/running_product": ("loop", "parallel"),  # short
    "logsumexp/running_logsumexp": ("loop", "parallel"),  # short
    "counts/counts_of_tokens": ("loop", "parallel"),  # short
    "sums_by_key/sums_by_token": ("loop", "parallel"),  # short
    "convolution/short_convolution": ("batched", "dense"),
    "convolution/short_convolution_by_roll": ("batched", "dense"),
    "convolution/short_convolution_by_rows": ("batched", "dense"),
    "token_shift/token_shift": ("batched", "dense"),
    "lstm/lstm": ("loop", "loop"),
    "gru/gru": ("loop", "loop"),
    "slstm/scalar_lstm": ("loop", "loop"),
    "ttt/test_time_training": ("loop", "loop"),
    "linear_rnn/linear_rnn": ("loop", "loop"),
    "hybrid/attention_then_average": ("loop", "parallel"),  # short
    "hybrid/attention_then_average_apart": ("window_attention + loop", "parallel"),  # short
    "hybrid_before/average_then_attention": ("loop", "parallel"),  # short
    "hybrid_beside/attention_beside_a_state": ("loop", "parallel"),  # short
    "hybrid_recurrent/attention_fed_back": ("loop", "loop"),
    "states_as_outputs/last_state_of_linear_attention": ("loop", "parallel"),  # short
    # scores.py
    "alibi/alibi": ("batched", "operator"),  # short
    "alibi/alibi_of_positions": ("batched", "operator"),  # short
    "alibi/alibi_by_rows": ("batched", "operator"),  # short
    "alibi/alibi_by_sdpa": ("batched", "operator"),  # short
    "alibi_in_a_window/alibi_in_a_window": ("batched", "operator"),  # short
    "relative_bias/relative_bias": ("batched", "operator"),  # short
    "relative_bias/relative_bias_by_index": ("batched", "operator"),  # short
    "relative_bias/relative_bias_by_embedding": ("batched", "operator"),  # short
    "relative_bias/relative_bias_by_rows": ("batched", "operator"),  # short
    "bias_rows/bias_by_rows": ("batched", "operator"),  # short
    "softcap/softcap": ("batched", "operator"),  # short
    "softcap/softcap_then_bias": ("batched", "operator"),  # short
    "softcap_in_a_window/softcap_in_a_window": ("batched", "operator"),  # short
    "qk_norm/qk_norm": ("batched", "operator"),  # short
    "qk_norm/qk_norm_in_the_step": ("window_attention", "operator"),
    "qk_norm/qk_norm_of_the_cache": ("copies", "operator"),  # short
    "temperature/temperature_of_a_head": ("batched", "operator"),  # short
    "temperature_of_a_token/temperature_of_a_token": ("batched", "operator"),  # short
    "rope/rope_before": ("window_attention", "operator"),
    "rope/rope_in_the_step": ("window_attention", "operator"),
    "rope/rope_of_the_cache": ("dense + copies", "operator"),  # short
    "rope/rope_by_rows": ("window_attention", "operator"),
    "two_products/two_products": ("batched", "operator"),  # short
    "two_products/two_products_joined": ("window_attention", "operator"),
    "latent/latent_absorbed": ("window_attention", "operator"),
    "latent/latent_expanded": ("window_attention", "operator"),
    "latent/latent_before_the_cache": ("window_attention", "operator"),
    "sink_logit/sink_by_cat": ("batched", "operator"),  # short
    "sink_logit/sink_in_the_sum": ("copies", "operator"),  # short
    "sink_logit/sink_by_sigmoid": ("dense + copies", "operator"),  # short
    "sink_logit/sink_as_a_row": ("batched", "operator"),  # short
    "sink_logit_in_a_window/sink_in_a_window": ("batched", "operator"),  # short
    "softmax1/softmax1": ("copies", "operator"),  # short
    "softmax1/softmax1_by_pad": ("batched", "operator"),  # short
    "two_caches/two_caches_by_cat": ("batched", "operator"),  # short
    "two_caches/two_caches_split": ("copies", "operator"),  # short
    "two_caches/two_caches_joined": ("dense", "operator"),  # short
    "two_caches/two_caches_merged": ("dense + copies", "operator"),  # short
    "memory_and_past/memory_and_past": ("batched", "operator"),  # short
    "sigmoid/sigmoid_attention": ("batched", "dense"),
    "sigmoid/sigmoid_of_minus_infinity": ("copies", "dense"),  # short
    "relu/relu_attention": ("copies", "dense"),  # short
    "talking_heads/talking_heads": ("copies", "dense"),  # short
    "differential/differential": ("copies", "operator"),  # short
    "differential/differential_of_outputs": ("window_attention", "operator"),
    "forgetting/forgetting_before": ("batched", "operator"),  # short
    "forgetting/forgetting_in_the_step": ("loop", "operator"),  # short
    "forgetting/forgetting_by_a_bias_that_grows": ("loop", "operator"),  # short
    "gated_output/gated_output": ("window_attention", "operator"),
    # selection.py
    "moba/moba_by_mask": ("rows of the selected blocks + copies", "operator"),  # short
    "moba/moba_by_finite_mask": ("rows of the selected blocks + copies", "operator"),  # short
    "moba/moba_by_bias": ("copies", "operator"),  # short
    "moba/moba_by_gather": ("dense + copies", "operator"),  # short
    "moba/moba_by_gather_of_blocks": ("dense + copies", "operator"),  # short
    "moba/moba_by_threshold": ("dense + copies", "dense"),  # short
    "moba/moba_by_one_hot": ("dense + copies", "operator"),  # short
    "moba/moba_by_comparison": ("dense + copies", "operator"),  # short
    "moba/moba_by_sdpa": ("rows of the selected blocks + copies", "operator"),  # short
    "moba/moba_with_running_means": ("loop", "operator"),  # short
    "moba_of_a_group/moba_of_a_group": ("rows of the selected blocks + copies", "operator"),  # short
    "moba_of_heads_in_a_group/moba_of_heads_in_a_group": ("rows of the selected blocks + copies", "operator"),  # short
    "dsa/dsa_by_mask": ("dense", "operator"),  # short
    "dsa/dsa_by_bias": ("batched", "operator"),  # short
    "dsa/dsa_by_finite_mask": ("dense", "operator"),  # short
    "dsa/dsa_by_gather": ("dense + copies", "operator"),  # short
    "dsa/dsa_by_index": ("dense + copies", "operator"),  # short
    "dsa/dsa_by_threshold": ("dense", "dense"),
    "dsa/dsa_by_values": ("dense + copies", "operator"),  # short
    "dsa_with_index_weights/dsa_with_scores_added": ("batched", "operator"),  # short
    "dsa_with_loss/dsa_with_loss": ("dense", "operator"),  # short
    "dsa_per_group/dsa_per_group": ("selected_attention", "operator"),
    "top_tokens_per_head/top_tokens_by_threshold": ("dense", "dense"),
    "top_tokens_per_head/top_tokens_by_gather": ("copies", "operator"),  # short
    "top_tokens_per_head/top_tokens_by_mask": ("selected_attention", "operator"),
    "nsa/nsa_by_finite_mask": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_mask": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_gather": ("dense + copies", "operator"),  # short
    "nsa/nsa_by_gather_of_rows": ("dense + copies", "operator"),  # short
    "nsa/nsa_by_comparison": ("compressed_attention + dense + window_attention", "operator"),  # short
    "nsa/nsa_by_sdpa": ("compressed_attention + dense + window_attention", "operator"),  # short
    "selected_and_window/selected_and_window": ("dense", "operator"),  # short
    "quest/quest_by_mask": ("rows of the selected blocks + copies", "operator"),  # short
    "quest/quest_by_gather": ("dense + copies", "operator"),  # short
    "quest_running/quest_with_running_bounds": ("loop", "operator"),  # short
    "msa/best_key_of_a_block": ("selected_attention", "operator"),
    "msa_with_index/best_index_key_of_a_block": ("copies", "operator"),  # short
    "qsa/pooled_index_keys": ("rows of the selected blocks + copies", "operator"),  # short
    "infllm/overlapping_means_max_pooled": ("selected_attention", "operator"),
    "hca/compressed_window_and_sink": ("crash", "operator"),  # short
    "csa/best_compressed_window_and_sink": ("crash", "operator"),  # short
    "csa/best_compressed_written": ("crash", "operator"),  # short
    "compressed/complete_blocks_and_self": ("batched", "operator"),  # short
    "selection_given/selection_given": ("dense", "operator"),  # short
    # softmax.py
    "causal/masked_fill_inf": ("window_attention", "operator"),
    "causal/where_inf": ("window_attention", "operator"),
    "causal/fill_minus_1e9": ("copies", "operator"),  # short
    "causal/fill_minus_1e4": ("copies", "operator"),  # short
    "causal/fill_finfo_min": ("window_attention", "operator"),
    "causal/add_finfo_min": ("copies", "operator"),  # short
    "causal/add_rows_of_finfo_min": ("copies", "operator"),  # short
    "causal/tril_rows": ("dense", "operator"),  # short
    "causal/tril_by_index_select": ("dense", "operator"),  # short
    "causal/sdpa_bool": ("window_attention", "operator"),
    "causal/sdpa_float": ("window_attention", "operator"),
    "causal/exp_over_sum": ("copies", "operator"),  # short
    "causal/exp_times_mask": ("copies", "operator"),  # short
    "causal/exp_minus_logsumexp": ("copies", "operator"),  # short
    "causal/log_softmax_exp": ("copies", "operator"),  # short
    "causal/online_softmax": ("copies", "operator"),  # short
    "causal/softmax_then_mask": ("copies", "operator"),  # short
    "causal/nan_to_num": ("window_attention", "operator"),
    "causal/float32_scores": ("window_attention", "operator"),
    "causal/float32_softmax": ("batched", "operator"),  # short
    "causal/dropout_of_zero": ("window_attention", "operator"),
    "causal/matmul": ("window_attention", "operator"),
    "causal/product_and_sum": ("batched", "operator"),  # short
    "causal/bmm_of_flat_heads": ("window_attention", "operator"),
    "causal/baddbmm": ("copies", "operator"),  # short
    "causal/cache_of_tokens_then_heads": ("window_attention", "operator"),
    "causal/cache_of_time_first": ("window_attention", "operator"),
    "causal/transposed_keys": ("window_attention", "operator"),
    "causal/keys_and_values_stacked": ("dense + copies", "operator"),  # short
    "causal/keys_and_values_joined": ("dense + copies", "operator"),  # short
    "causal/caches_in_a_dict": ("window_attention", "operator"),
    "causal/written_by_index_copy": ("window_attention", "operator"),
    "causal/written_by_scatter": ("window_attention", "operator"),
    "causal/written_by_index_put": ("loop", "operator"),  # short
    "causal/written_to_a_clone": ("window_attention", "operator"),
    "causal/written_by_blend": ("loop", "operator"),  # short
    "causal/written_by_one_hot": ("loop", "operator"),  # short
    "causal/written_by_lerp": ("loop", "operator"),  # short
    "causal/written_by_masked_scatter": ("loop", "operator"),  # short
    "causal/written_by_select_scatter": ("one line", "one line"),
    "causal/newest_first": ("dense + copies", "operator"),  # short
    "causal/newest_last_by_roll": ("dense + copies", "operator"),  # short
    "causal/position_as_a_counter": ("window_attention", "operator"),
    "causal/lengths_as_a_carry": ("loop", "operator"),  # short
    "causal/flags_of_written_rows": ("dense", "operator"),  # short
    "causal/positions_in_a_cache": ("dense", "operator"),  # short
    "causal/bias_in_a_cache": ("copies", "operator"),  # short
    "causal/positions_closed_over": ("loop", "operator"),  # short
    "causal/mask_closed_over": ("dense + copies", "operator"),  # short
    "causal/positions_as_a_buffer": ("loop", "operator"),  # short
    "causal/triangle_as_a_buffer": ("loop", "operator"),  # short
    "causal/positions_by_cumsum": ("window_attention", "operator"),
    "causal/positions_as_floats": ("dense", "operator"),  # short
    "causal/new_row_apart": ("batched", "operator"),  # short
    "grouped/grouped_einsum": ("window_attention", "operator"),
    "grouped/repeat_kv": ("window_attention", "operator"),
    "grouped/repeat_interleave": ("window_attention", "operator"),
    "grouped/sdpa_enable_gqa": ("window_attention", "operator"),
    "grouped/repeated_before": ("window_attention", "operator"),
}
