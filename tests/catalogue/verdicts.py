"""What became of each program, and what is owed to it: the class that an expert would expect of a compiler.

Verdicts are asserted as they stand, so that a program that gets better or worse shows here. `# short` marks those of a
worse class than the one owed.
"""

#: name -> (verdict today, class owed); `catalogue.CLASSES` says what the classes are.
VERDICTS = {
    # masks.py
    "window/window_by_mask": ("window_attention", "operator"),
    "window/window_by_distance": ("window_attention", "operator"),
    "window/window_rows_of_finfo_min": ("scored_attention", "operator"),
    "window/window_by_sdpa": ("window_attention", "operator"),
    "window/window_by_finfo_min": ("window_attention", "operator"),
    "window/window_by_ring": ("window_attention", "operator"),
    "window/window_by_ring_index_copy": ("window_attention", "operator"),
    "window/window_by_ring_with_positions": ("window_attention", "operator"),
    "window/window_by_ring_with_counter": ("window_attention", "operator"),
    "window/window_by_shift": ("window_attention", "operator"),
    "window/window_by_roll": ("window_attention", "operator"),
    "window/window_by_stack": ("window_attention", "operator"),
    "window/window_by_select_scatter": ("window_attention", "operator"),
    "window/window_by_gather": ("window_attention", "operator"),
    "window_per_head/window_per_head": ("scored_attention", "operator"),
    "window_or_full/window_in_half_of_the_heads": ("scored_attention", "operator"),
    "window_and_sinks/sinks_by_mask": ("scored_attention", "operator"),
    "window_and_sinks/sinks_before_a_ring": ("scored_attention", "operator"),
    "window_and_sinks/sinks_in_their_own_cache": ("scored_attention", "operator"),
    "longformer/global_tokens": ("scored_attention", "operator"),
    "longformer/global_tokens_by_rows": ("scored_attention", "operator"),
    "longformer_symmetric/global_queries_too": ("scored_attention", "operator"),
    "bigbird/random_blocks": ("scored_attention", "operator"),
    "strided/strided_from_the_query": ("scored_attention", "dense"),
    "sparse_transformer/strided_and_window": ("scored_attention", "operator"),
    "dilated/dilated_window": ("scored_attention", "operator"),
    "chunked/chunked": ("scored_attention", "operator"),
    "chunked/chunk_buffer": ("scored_attention", "operator"),
    "chunk_and_previous/chunk_and_previous": ("scored_attention", "operator"),
    "block_causal/block_causal": ("scored_attention", "operator"),
    "prefix_lm/prefix_lm": ("scored_attention", "operator"),
    "prefix_lm/prefix_in_the_cache": ("scored_attention", "operator"),
    "documents/documents_closed_over": ("scored_attention", "operator"),
    "documents/documents_in_a_cache": ("scored_attention", "operator"),
    "documents/documents_in_a_cache_finite": ("scored_attention", "operator"),
    "documents/documents_by_start": ("scored_attention", "operator"),
    "documents/documents_by_rows": ("scored_attention", "operator"),
    "documents/documents_by_bias": ("copies", "operator"),  # short
    "documents/documents_by_sdpa": ("scored_attention", "operator"),
    "documents_in_a_window/documents_and_window": ("scored_attention", "operator"),
    "left_padding/padding_nan_to_num": ("scored_attention", "operator"),
    "left_padding/padding_sees_itself": ("scored_attention", "operator"),
    "left_padding/padding_finfo_min": ("scored_attention", "operator"),
    "left_padding/padding_fill_minus_1e9": ("scored_attention", "operator"),
    "left_padding/padding_in_a_cache": ("scored_attention", "operator"),
    "left_padding/padding_by_number": ("scored_attention", "operator"),
    "cross/cross_attention": ("dense", "dense"),
    "cross_padded/cross_attention_padded": ("scored_attention", "dense"),
    "cross_padded/cross_attention_in_the_carry": ("scored_attention", "dense"),
    "self_and_cross/self_and_cross_attention": ("dense + window_attention", "dense"),
    "encoder/no_mask": ("dense", "dense"),
    # recurrences.py
    "linear_attention/linear_by_einsum": ("batched", "parallel"),  # short
    "linear_attention/linear_by_broadcast": ("batched", "parallel"),  # short
    "linear_attention/linear_transposed": ("batched", "parallel"),  # short
    "linear_attention/linear_by_baddbmm": ("batched", "parallel"),  # short
    "linear_attention/linear_by_cache": ("batched", "dense"),
    "linear_attention_normalised/linear_normalised": ("batched", "parallel"),  # short
    "linear_attention_normalised/linear_normalised_by_ones": ("batched", "parallel"),  # short
    "retnet/retention": ("batched", "parallel"),  # short
    "retnet/retention_by_cache": ("batched", "dense"),
    "scalar_decay/scalar_decay": ("batched", "parallel"),  # short
    "scalar_decay_log/scalar_decay_log": ("batched", "parallel"),  # short
    "gla/gated_linear": ("batched", "parallel"),  # short
    "gla/gated_linear_by_diagonal": ("loop", "parallel"),  # short
    "gated_values/hgrn2": ("batched", "parallel"),  # short
    "mlstm/matrix_lstm": ("batched", "parallel"),  # short
    "delta/delta_rule": ("batched", "parallel"),  # short
    "delta/delta_rule_by_matrix": ("batched", "parallel"),  # short
    "gated_delta/gated_delta_rule": ("batched", "parallel"),  # short
    "kda/kimi_delta_rule": ("batched", "parallel"),  # short
    "rwkv7/generalised_delta_rule": ("loop", "parallel"),  # short
    "rwkv6/rwkv6": ("batched", "parallel"),  # short
    "rwkv4/rwkv4": ("batched", "parallel"),  # short
    "mamba/selective_scan": ("batched", "parallel"),  # short
    "mamba/selective_scan_discretised": ("batched", "parallel"),  # short
    "mamba2/state_space_dual": ("batched", "parallel"),  # short
    "diagonal_ssm/complex_decay": ("loop", "parallel"),  # short
    "rg_lru/griffin": ("batched", "parallel"),  # short
    "hgrn/gated_average": ("batched", "parallel"),  # short
    "hgrn/gated_average_by_lerp": ("batched", "parallel"),  # short
    "hgrn/gated_average_by_difference": ("batched", "parallel"),  # short
    "min_gru/min_gru": ("batched", "parallel"),  # short
    "ema/exponential_average": ("batched", "parallel"),  # short
    "ema_corrected/exponential_average_corrected": ("batched", "parallel"),  # short
    "two_averages/two_averages": ("batched", "parallel"),  # short
    "sum/running_sum": ("batched", "parallel"),  # short
    "mean/running_mean": ("batched", "parallel"),  # short
    "mean/running_mean_by_correction": ("batched", "parallel"),  # short
    "mean/running_mean_by_cache": ("batched", "dense"),
    "welford/running_variance": ("batched", "parallel"),  # short
    "max/running_max": ("batched", "parallel"),  # short
    "min/running_min": ("loop", "parallel"),  # short
    "product/running_product": ("batched", "parallel"),  # short
    "logsumexp/running_logsumexp": ("loop", "parallel"),  # short
    "counts/counts_of_tokens": ("batched", "parallel"),  # short
    "sums_by_key/sums_by_token": ("batched", "parallel"),  # short
    "convolution/short_convolution": ("batched", "dense"),
    "convolution/short_convolution_by_roll": ("batched", "dense"),
    "convolution/short_convolution_by_rows": ("batched", "dense"),
    "token_shift/token_shift": ("batched", "dense"),
    "lstm/lstm": ("loop", "loop"),
    "gru/gru": ("loop", "loop"),
    "slstm/scalar_lstm": ("loop", "loop"),
    "ttt/test_time_training": ("loop", "loop"),
    "linear_rnn/linear_rnn": ("loop", "loop"),
    "hybrid/attention_then_average": ("window_attention", "parallel"),
    "hybrid/attention_then_average_apart": ("window_attention", "parallel"),
    "hybrid_before/average_then_attention": ("window_attention", "parallel"),
    "hybrid_beside/attention_beside_a_state": ("window_attention", "parallel"),
    "hybrid_recurrent/attention_fed_back": ("loop", "loop"),
    "states_as_outputs/last_state_of_linear_attention": ("batched", "parallel"),  # short
    # scores.py
    "alibi/alibi": ("scored_attention", "operator"),
    "alibi/alibi_of_positions": ("scored_attention", "operator"),
    "alibi/alibi_by_rows": ("scored_attention", "operator"),
    "alibi/alibi_by_sdpa": ("scored_attention", "operator"),
    "alibi_in_a_window/alibi_in_a_window": ("scored_attention", "operator"),
    "relative_bias/relative_bias": ("scored_attention", "operator"),
    "relative_bias/relative_bias_by_index": ("scored_attention", "operator"),
    "relative_bias/relative_bias_by_embedding": ("scored_attention", "operator"),
    "relative_bias/relative_bias_by_rows": ("scored_attention", "operator"),
    "bias_rows/bias_by_rows": ("scored_attention", "operator"),
    "softcap/softcap": ("scored_attention", "operator"),
    "softcap/softcap_then_bias": ("scored_attention", "operator"),
    "softcap_in_a_window/softcap_in_a_window": ("scored_attention", "operator"),
    "qk_norm/qk_norm": ("scored_attention", "operator"),
    "qk_norm/qk_norm_in_the_step": ("window_attention", "operator"),
    "qk_norm/qk_norm_of_the_cache": ("scored_attention", "operator"),
    "temperature/temperature_of_a_head": ("scored_attention", "operator"),
    "temperature_of_a_token/temperature_of_a_token": ("scored_attention", "operator"),
    "rope/rope_before": ("window_attention", "operator"),
    "rope/rope_in_the_step": ("window_attention", "operator"),
    "rope/rope_of_the_cache": ("window_attention", "operator"),
    "rope/rope_by_rows": ("window_attention", "operator"),
    "two_products/two_products": ("scored_attention", "operator"),
    "two_products/two_products_joined": ("window_attention", "operator"),
    "latent/latent_absorbed": ("window_attention", "operator"),
    "latent/latent_expanded": ("window_attention", "operator"),
    "latent/latent_before_the_cache": ("window_attention", "operator"),
    "sink_logit/sink_by_cat": ("scored_attention", "operator"),
    "sink_logit/sink_in_the_sum": ("copies", "operator"),  # short
    "sink_logit/sink_by_sigmoid": ("dense + copies", "operator"),  # short
    "sink_logit/sink_as_a_row": ("scored_attention", "operator"),
    "sink_logit_in_a_window/sink_in_a_window": ("scored_attention", "operator"),
    "softmax1/softmax1": ("copies", "operator"),  # short
    "softmax1/softmax1_by_pad": ("scored_attention", "operator"),
    "two_caches/two_caches_by_cat": ("scored_attention", "operator"),
    "two_caches/two_caches_split": ("scored_attention", "operator"),
    "two_caches/two_caches_joined": ("scored_attention", "operator"),
    "two_caches/two_caches_merged": ("dense + copies", "operator"),  # short
    "memory_and_past/memory_and_past": ("scored_attention", "operator"),
    "sigmoid/sigmoid_attention": ("batched", "dense"),
    "sigmoid/sigmoid_of_minus_infinity": ("copies", "dense"),  # short
    "relu/relu_attention": ("batched", "dense"),
    "talking_heads/talking_heads": ("batched", "dense"),
    "differential/differential": ("batched", "operator"),  # short
    "differential/differential_of_outputs": ("window_attention", "operator"),
    "forgetting/forgetting_before": ("scored_attention", "operator"),
    "forgetting/forgetting_in_the_step": ("scored_attention", "operator"),
    "forgetting/forgetting_by_a_bias_that_grows": ("scored_attention", "operator"),
    "gated_output/gated_output": ("window_attention", "operator"),
    # selection.py
    "moba/moba_by_mask": ("selected_attention", "operator"),
    "moba/moba_by_finite_mask": ("rows of the selected blocks + copies", "operator"),  # short
    "moba/moba_by_bias": ("selected_attention", "operator"),
    "moba/moba_by_gather": ("selected_attention", "operator"),
    "moba/moba_by_gather_of_blocks": ("selected_attention", "operator"),
    "moba/moba_by_threshold": ("copies", "dense"),  # short
    "moba/moba_by_one_hot": ("selected_attention", "operator"),
    "moba/moba_by_comparison": ("selected_attention", "operator"),
    "moba/moba_by_sdpa": ("selected_attention", "operator"),
    "moba/moba_with_running_means": ("selected_attention", "operator"),
    "moba_of_a_group/moba_of_a_group": ("selected_attention", "operator"),
    "moba_of_heads_in_a_group/moba_of_heads_in_a_group": ("selected_attention", "operator"),
    "dsa/dsa_by_mask": ("selected_attention", "operator"),
    "dsa/dsa_by_bias": ("selected_attention", "operator"),
    "dsa/dsa_by_finite_mask": ("selected_attention", "operator"),
    "dsa/dsa_by_gather": ("selected_attention", "operator"),
    "dsa/dsa_by_index": ("selected_attention", "operator"),
    "dsa/dsa_by_threshold": ("scored_attention", "dense"),
    "dsa/dsa_by_values": ("dense", "operator"),  # short
    "dsa_with_index_weights/dsa_with_scores_added": ("scored_attention + copies", "operator"),  # short
    "dsa_with_loss/dsa_with_loss": ("selected_attention", "operator"),
    "dsa_per_group/dsa_per_group": ("selected_attention", "operator"),
    "top_tokens_per_head/top_tokens_by_threshold": ("scored_attention", "dense"),
    "top_tokens_per_head/top_tokens_by_gather": ("selected_attention", "operator"),
    "top_tokens_per_head/top_tokens_by_mask": ("selected_attention", "operator"),
    "nsa/nsa_by_finite_mask": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_mask": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_gather": ("compressed_attention + scored_attention + window_attention + copies", "operator"),  # short
    "nsa/nsa_by_gather_of_rows": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_comparison": ("compressed_attention + selected_attention + window_attention", "operator"),
    "nsa/nsa_by_sdpa": ("compressed_attention + selected_attention + window_attention", "operator"),
    "selected_and_window/selected_and_window": ("scored_attention", "operator"),
    "quest/quest_by_mask": ("selected_attention", "operator"),
    "quest/quest_by_gather": ("selected_attention", "operator"),
    "quest_running/quest_with_running_bounds": ("loop", "operator"),  # short
    "msa/best_key_of_a_block": ("selected_attention", "operator"),
    "msa_with_index/best_index_key_of_a_block": ("scored_attention", "operator"),
    "qsa/pooled_index_keys": ("selected_attention", "operator"),
    "infllm/overlapping_means_max_pooled": ("selected_attention", "operator"),
    "hca/compressed_window_and_sink": ("scored_attention", "operator"),
    "csa/best_compressed_window_and_sink": ("scored_attention", "operator"),
    "csa/best_compressed_written": ("scored_attention", "operator"),
    "compressed/complete_blocks_and_self": ("scored_attention", "operator"),
    "selection_given/selection_given": ("selected_attention", "operator"),
    # softmax.py
    "causal/masked_fill_inf": ("window_attention", "operator"),
    "causal/where_inf": ("window_attention", "operator"),
    "causal/fill_minus_1e9": ("scored_attention", "operator"),
    "causal/fill_minus_1e4": ("scored_attention", "operator"),
    "causal/fill_finfo_min": ("window_attention", "operator"),
    "causal/add_finfo_min": ("scored_attention", "operator"),
    "causal/add_rows_of_finfo_min": ("scored_attention", "operator"),
    "causal/tril_rows": ("window_attention", "operator"),
    "causal/tril_by_index_select": ("window_attention", "operator"),
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
    "causal/float32_softmax": ("scored_attention", "operator"),
    "causal/dropout_of_zero": ("window_attention", "operator"),
    "causal/matmul": ("window_attention", "operator"),
    "causal/product_and_sum": ("batched", "operator"),  # short
    "causal/bmm_of_flat_heads": ("window_attention", "operator"),
    "causal/baddbmm": ("window_attention", "operator"),
    "causal/cache_of_tokens_then_heads": ("window_attention", "operator"),
    "causal/cache_of_time_first": ("window_attention", "operator"),
    "causal/transposed_keys": ("window_attention", "operator"),
    "causal/keys_and_values_stacked": ("window_attention", "operator"),
    "causal/keys_and_values_joined": ("window_attention", "operator"),
    "causal/caches_in_a_dict": ("window_attention", "operator"),
    "causal/written_by_index_copy": ("window_attention", "operator"),
    "causal/written_by_scatter": ("window_attention", "operator"),
    "causal/written_by_index_put": ("loop", "operator"),  # short
    "causal/written_to_a_clone": ("window_attention", "operator"),
    "causal/written_by_blend": ("dense + copies", "operator"),  # short
    "causal/written_by_one_hot": ("dense + copies", "operator"),  # short
    "causal/written_by_lerp": ("batched", "operator"),  # short
    "causal/written_by_masked_scatter": ("loop", "operator"),  # short
    "causal/written_by_select_scatter": ("one line", "one line"),
    "causal/newest_first": ("window_attention", "operator"),
    "causal/newest_last_by_roll": ("window_attention", "operator"),
    "causal/position_as_a_counter": ("window_attention", "operator"),
    "causal/lengths_as_a_carry": ("dense + copies", "operator"),  # short
    "causal/flags_of_written_rows": ("window_attention", "operator"),
    "causal/positions_in_a_cache": ("window_attention", "operator"),
    "causal/bias_in_a_cache": ("scored_attention", "operator"),
    "causal/positions_closed_over": ("window_attention", "operator"),
    "causal/mask_closed_over": ("window_attention", "operator"),
    "causal/positions_as_a_buffer": ("window_attention", "operator"),
    "causal/triangle_as_a_buffer": ("window_attention", "operator"),
    "causal/positions_by_cumsum": ("window_attention", "operator"),
    "causal/positions_as_floats": ("window_attention", "operator"),
    "causal/new_row_apart": ("scored_attention", "operator"),
    "grouped/grouped_einsum": ("window_attention", "operator"),
    "grouped/repeat_kv": ("window_attention", "operator"),
    "grouped/repeat_interleave": ("window_attention", "operator"),
    "grouped/sdpa_enable_gqa": ("window_attention", "operator"),
    "grouped/repeated_before": ("window_attention", "operator"),
}
