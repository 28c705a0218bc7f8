"""Planted faults, each of which a named test must catch.

A suite that passes says nothing until it has been seen to fail. Each mutant stands for a defect
that some published kernel had. `flash-rosetta conformance --kill-table` shows which test catches
which.
"""

from __future__ import annotations

from flash_rosetta.conformance.planting import (
    Edit,
    GpuMutant,
    InterfaceMutant,
    KernelMutant,
    Mutant,
    Test,
)


def forward_on(purpose: str, only: str = "") -> Test:
    return Test("test_forward.py", "test_o_and_lse", purpose, only)


def backward_on(purpose: str, only: str = "") -> Test:
    return Test("test_backward.py", "test_dq_dk_dv", purpose, only)


MUTANTS = (
    Mutant(
        "no_rescale",
        "Dao-AILab/flash-attention#2082",
        forward_on("edge"),
        [Edit("acc = alpha * acc + gemm(", "acc = acc + gemm(")],
    ),
    Mutant(
        "phantom_keys_past_the_end",
        "FluxML/NNkernels.jl#16, and the article this repository grew from",
        forward_on("tail"),
        [Edit("& (j < problem.seqlen_k)", "& (j >= 0)")],
    ),
    Mutant(
        "maximum_of_all_rows_of_a_tile",
        "this repository's own kernels: what one row saw rescaled the others of its warp",
        Test("test_properties.py", "test_no_later_key_counts"),
        [
            Edit(
                "torch.maximum(m, s.amax(-1, keepdim=True))",
                "torch.maximum(m, s.amax((-2, -1), keepdim=True).expand_as(m))",
            )
        ],
    ),
    Mutant(
        "base_2_lse",
        "lightseekorg/tokenspeed#571",
        forward_on("edge"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()) / 0.6931471805599453")],
    ),
    Mutant(
        "top_left_for_bottom_right",
        "NVIDIA/cutlass#2336",
        forward_on("ragged"),
        [Edit("mask & (j <= i + problem.causal_offset)", "mask & (j <= i)")],
    ),
    Mutant(
        "bottom_right_for_top_left",
        "Dao-AILab/flash-attention#581",
        forward_on("masked", only="causal-tl"),
        [
            Edit(
                "mask & (j <= i + problem.causal_offset)",
                "mask & (j <= i + problem.seqlen_k - problem.seqlen_q)",
            )
        ],
    ),
    Mutant(
        "no_diagonal_in_late_rows",
        "PaddlePaddle/flash-attention#48",
        forward_on("long"),
        [Edit("(j <= i + problem.causal_offset)", "(j <= i - (2 * i > problem.seqlen_q).int())")],
        passes_max_abs=True,
    ),
    Mutant(
        "one_future_key_in_late_rows",
        "keras-team/keras#23038",
        forward_on("long"),
        [Edit("(j <= i + problem.causal_offset)", "(j <= i + (2 * i > problem.seqlen_q).int())")],
        passes_max_abs=True,
    ),
    Mutant(
        "finite_minus_infinity",
        "flashinfer-ai/flashinfer#4267",
        forward_on("huge"),
        [Edit("1), -torch.inf, dtype=dtype)", "1), -5e4, dtype=dtype)")],
    ),
    Mutant(
        "rounded_maximum",
        "pytorch/pytorch#121558",
        forward_on("huge"),
        [Edit("p = (s - m_safe).exp()", "p = (s - m_safe * (1 + 2**-23)).exp()")],
    ),
    Mutant(
        "maximum_before_a_negative_scale",
        "triton-lang/triton tutorial 06",
        forward_on("scale"),
        [
            Edit(
                "torch.maximum(m, s.amax(-1, keepdim=True))",
                "torch.maximum(m, (s.amax if scale >= 0 else s.amin)(-1, keepdim=True))",
            )
        ],
    ),
    Mutant(
        "nan_from_a_row_without_keys",
        "Dao-AILab/flash-attention#443",
        forward_on("masked"),
        [Edit("m_safe = m.where(m != -torch.inf, 0)", "m_safe = m")],
    ),
    Mutant(
        "lse_zero_for_a_row_without_keys",
        "pytorch/pytorch#134650",
        Test("test_properties.py", "test_rows_without_keys"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()).where(sees_a_key, 0)")],
    ),
    Mutant(
        "nan_in_a_key_vanishes",
        "pytorch/pytorch#141128",
        Test("test_properties.py", "test_inf_and_nan_in_a_key_reach_its_rows"),
        [
            Edit(
                "s = s.where(mask, -torch.inf)",
                "s = s.where(mask, -torch.inf)\n" + " " * 16 + "s = s.nan_to_num(-torch.inf)",
            )
        ],
    ),
    Mutant(
        "nan_in_a_value_of_a_masked_tile_leaks",
        "pytorch/pytorch#101967",
        Test("test_properties.py", "test_nan_in_a_value_stays_out_of_earlier_tiles"),
        [Edit("key_end(q_start + tile_q, problem), tile_k)", "problem.seqlen_k, tile_k)")],
    ),
    Mutant(
        "scale_of_the_padded_head_dim",
        "vllm-project/vllm-ascend#1958",
        forward_on("head_dim"),
        [
            Edit(
                "accumulate_dtype(q.dtype), problem.scale",
                "accumulate_dtype(q.dtype), (1 << (q.shape[3] - 1).bit_length()) ** -0.5",
                times=2,
            )
        ],
    ),
    Mutant(
        "kv_head_by_modulo",
        "HazyResearch/HipKittens#22",
        forward_on("group"),
        [
            Edit(
                "x[:, g :: self.group_size]",
                "x[:, (n := x.shape[1] // self.group_size) * g : n * (g + 1)]",
            )
        ],
    ),
    Mutant(
        "accumulator_in_low_precision",
        "philipturner/metal-flash-attention#13",
        forward_on("long"),
        [
            Edit(
                "gemm(p.to(v.dtype), v_tile, problem)",
                "gemm(p.to(v.dtype), v_tile, problem)\n"
                + " " * 16
                + "acc = acc.to(q.dtype).to(dtype)",
            )
        ],
    ),
    Mutant(
        "output_in_another_dtype",
        "tinygrad/tinygrad#5100",
        forward_on("edge"),
        [
            Edit(
                "o = q.new_empty(*q.shape[:3], v.shape[3])",
                "o = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)",
            )
        ],
    ),
    Mutant(
        "ragged_tile_not_written",
        "tile-ai/tilelang#2525",
        forward_on("ragged"),
        [
            Edit(
                'hbm.store("o", q_start, o_tile, g)',
                'q_start + tile_q > problem.seqlen_q or hbm.store("o", q_start, o_tile, g)',
            )
        ],
    ),
    Mutant(
        "input_overwritten",
        "ScalingIntelligence/KernelBench EVAL.md",
        forward_on("edge"),
        [Edit("    return o, lse\n", "    q[..., -1, :] += 1\n    return o, lse\n")],
    ),
    Mutant(
        "result_kept_and_reused",
        "ScalingIntelligence/KernelBench EVAL.md",
        Test("test_properties.py", "test_results_outlive_the_next_call"),
        [
            Edit(
                "o = q.new_empty(*q.shape[:3], v.shape[3])",
                'o = globals().setdefault("kept", q.new_empty(*q.shape[:3], v.shape[3]))',
            )
        ],
    ),
    Mutant(
        "keys_of_an_earlier_call",
        "tile-ai/tilelang#547",
        Test("test_properties.py", "test_calls_do_not_disturb_each_other"),
        [
            Edit(
                "traffic, q=q, k=k, v=v, o=o, lse=lse[..., None])",
                "traffic, q=q, k=globals().setdefault(str(k.shape), k), v=v, o=o, "
                "lse=lse[..., None])",
            )
        ],
    ),
    Mutant(
        "dq_short_in_late_rows",
        "Dao-AILab/flash-attention#2896",
        backward_on("long"),
        [
            Edit(
                'hbm.store("dq", q_start, scale *',
                'hbm.store("dq", q_start, (0.9 if 2 * q_start > problem.seqlen_q else 1) * scale *',
            )
        ],
        passes_max_abs=True,
    ),
    Mutant(
        "p_unmasked_in_the_backward",
        "Dao-AILab/flash-attention#1947",
        backward_on("edge"),
        [Edit("p = p.where(mask, 0)", "pass")],
    ),
    Mutant(
        "ds_unmasked",
        "triton-lang/triton#5660",
        backward_on("edge"),
        [
            Edit("ds = p * (dp - delta_tile)", "ds = (s - lse_tile).exp() * (dp - delta_tile)"),
            Edit("ds = ds.where(mask, 0)", "pass"),
        ],
    ),
    Mutant(
        "stale_dk",
        "tile-ai/tilelang#2668",
        backward_on("edge"),
        [
            Edit(
                "dk_tile = torch.zeros_like(k_tile, dtype=dtype)",
                "dk_tile = dk_tile if k_start else torch.zeros_like(k_tile, dtype=dtype)",
            )
        ],
    ),
    Mutant(
        "do_taken_for_contiguous",
        "pytorch/pytorch#112577",
        backward_on("layout"),
        [Edit("o=o, do=do,", "o=o, do=do.as_strided(do.shape, o.stride()),")],
    ),
    Mutant(
        "dlse_with_the_wrong_sign",
        "Dao-AILab/flash-attention#889",
        Test("test_pytorch.py", "test_gradient_of_one_output"),
        [Edit("delta_tile = delta_tile - dlse_tile", "delta_tile = delta_tile + dlse_tile")],
    ),
    Mutant(
        "different_bits_every_time",
        "Dao-AILab/flash-attention#414",
        Test("test_properties.py", "test_repeats_bit_for_bit"),
        [
            Edit(
                'hbm.store("dv", k_start, dv_tile)',
                'hbm.store("dv", k_start, dv_tile * (1 + 1e-3 * torch.rand_like(dv_tile)))',
            )
        ],
    ),
    Mutant(
        "rescale_inverted",
        "Dao-AILab/flash-attention#991",
        forward_on("edge"),
        [Edit("acc = alpha * acc + gemm(", "acc = (acc / alpha).nan_to_num(0) + gemm(")],
    ),
    Mutant(
        "no_maximum_subtracted",
        "prescient-design/e3tools#3",
        forward_on("peaked"),
        [Edit("torch.maximum(m, s.amax(-1, keepdim=True))", "torch.zeros_like(m)")],
    ),
    Mutant(
        "masked_keys_win_over_sunk_ones",
        "ohdearquant/lattice#361",
        forward_on("huge"),
        [Edit("s = s.where(mask, -torch.inf)", "s = s.where(mask, -1e4)")],
    ),
    Mutant(
        "average_for_a_row_without_keys",
        "pytorch/pytorch#103963",
        forward_on("masked"),
        [
            Edit("s = s.where(mask, -torch.inf)", "s = s.where(mask, -1e6)"),
            Edit("o_tile = (acc / l).where(sees_a_key, 0)", "o_tile = acc / l"),
        ],
    ),
    Mutant(
        "lse_finite_for_a_row_without_keys",
        "flashinfer-ai/flashinfer#4452",
        Test("test_properties.py", "test_rows_without_keys"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()).where(sees_a_key, -49993.0)")],
    ),
    Mutant(
        "lse_of_nan_is_minus_infinity",
        "Dao-AILab/flash-attention flash_attn/cute/softmax.py",
        Test("test_properties.py", "test_inf_and_nan_in_a_key_reach_its_rows"),
        [
            Edit(
                "lse_tile = m + l.log()",
                "lse_tile = (m + l.log()).nan_to_num(-torch.inf, torch.inf, -torch.inf)",
            )
        ],
    ),
    Mutant(
        "lse_in_low_precision",
        "tenstorrent/tt-metal#41683",
        forward_on("edge"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()).to(q.dtype).to(dtype)")],
    ),
    Mutant(
        "lse_tail_not_written",
        "tile-ai/tilelang#2567",
        forward_on("ragged"),
        [
            Edit(
                'hbm.store("lse", q_start, lse_tile, g)',
                "problem.seqlen_q % 4 and q_start + tile_q > problem.seqlen_q or "
                'hbm.store("lse", q_start, lse_tile, g)',
            )
        ],
    ),
    Mutant(
        "multiply_add_overflows",
        "pytorch/pytorch#121558, with scores near 1e10",
        Test("test_properties.py", "test_huge_scores_pick_the_largest"),
        [
            Edit(
                "s = scale * gemm(q_tile, k_tile.mT, problem)  # (1) [tile_q, tile_k]\n"
                "                mask",
                "raw = gemm(q_tile, k_tile.mT, problem)\n"
                "                s = scale * raw\n"
                "                mask",
            ),
            Edit(
                "p = (s - m_safe).exp()",
                "p = (scale * raw.double() - m_safe.double()).to(dtype).exp()\n"
                "                p = p.where(s != -torch.inf, 0)",
            ),
        ],
    ),
    Mutant(
        "tiny_scale_meets_the_mask",
        "PyTorch 2.13's CPU kernel: conformance/FINDINGS.md",
        Test("test_properties.py", "test_a_scale_below_fp32_makes_a_mean"),
        [
            Edit(
                "s = scale * gemm(q_tile, k_tile.mT, problem)  # (1) [tile_q, tile_k]\n"
                "                mask",
                "s = gemm(q_tile, k_tile.mT, problem)\n                mask",
            ),
            Edit(
                "s = s.where(mask, -torch.inf)",
                "s = s.where(mask, -torch.inf)\n                s = scale * s",
            ),
        ],
    ),
    Mutant(
        "scale_two_percent_large",
        "NVIDIA/Megatron-LM#848",
        forward_on("edge"),
        [
            Edit(
                "accumulate_dtype(q.dtype), problem.scale",
                "accumulate_dtype(q.dtype), 1.02 * problem.scale",
                times=2,
            )
        ],
        passes_max_abs=True,
    ),
    Mutant(
        "single_tile_skipped",
        "tile-ai/tilelang#2566",
        forward_on("tiny"),
        [
            Edit(
                "range(0, key_end(q_start + tile_q, problem), tile_k):",
                "range(0, key_end(q_start + tile_q, problem), tile_k)"
                "[: None if problem.seqlen_k > tile_k else 0]:",
            )
        ],
    ),
    Mutant(
        "key_loop_ends_at_the_top_left_diagonal",
        "tile-ai/tilelang#330",
        forward_on("ragged"),
        [
            Edit(
                "min(q_end, problem.seqlen_q) + problem.causal_offset)",
                "min(q_end, problem.seqlen_q) + min(problem.causal_offset, 0))",
            )
        ],
    ),
    Mutant(
        "heads_past_the_grid_not_written",  # of 400 on a CPU, where a GPU has 70,000
        "pytorch/pytorch#142228",
        forward_on("many"),
        [
            Edit(
                "    return o, lse\n",
                "    o.flatten(0, 1)[255:].fill_(torch.nan)\n    return o, lse\n",
            )
        ],
    ),
    Mutant(
        "tf32_without_leave",
        "triton-lang/triton#1671",
        forward_on("dtype", only="fp32"),
        [
            Edit(
                "return a.to(dtype) @ b.to(dtype)",
                "a, b = (\n"
                "            (t.to(dtype).view(torch.int32) & -0x2000).view(dtype)\n"
                "            if dtype == torch.float32\n"
                "            else t\n"
                "            for t in (a, b)\n"
                "        )\n"
                "        return a @ b",
            )
        ],
    ),
    Mutant(
        "address_rounded_down_to_16_bytes",
        "Dao-AILab/flash-attention#2143",
        forward_on("layout", only="misaligned"),
        [
            Edit(
                "        self.tensors = tensors\n",
                "        self.tensors = {\n"
                "            name: t.as_strided(t.shape, t.stride(), t.storage_offset() // 8 * 8)\n"
                "            for name, t in tensors.items()\n"
                "        }\n",
            )
        ],
    ),
    Mutant(
        "heads_of_an_expanded_batch",
        "Dao-AILab/flash-attention#2189",
        forward_on("layout", only="expanded_batch"),
        [
            Edit(
                "        self.tensors = tensors\n",
                "        self.tensors = {\n"
                "            name: t if t.stride(0) else t[:, :1].expand_as(t)\n"
                "            for name, t in tensors.items()\n"
                "        }\n",
            )
        ],
    ),
    Mutant(
        "do_taken_for_dense",
        "FlagOpen/FlagAttention#1",
        backward_on("layout", only="sliced_gradients"),
        [Edit("do=do, dq=dq", "do=do.as_strided(do.shape, dq.stride()), dq=dq")],
    ),
    Mutant(
        "strides_of_k_for_v",
        "pytorch/pytorch#138581",
        forward_on("layout", only="mixed"),
        [
            Edit(
                "v=v, o=o, lse=lse[..., None])",
                "v=v.as_strided(v.shape, k.stride(), v.storage_offset()), o=o, lse=lse[..., None])",
            )
        ],
    ),
    Mutant(
        "strides_of_the_first_call",
        "Dao-AILab/flash-attention#2298",
        Test("test_properties.py", "test_calls_do_not_disturb_each_other"),
        [
            Edit(
                "k=k, v=v, o=o, lse=lse[..., None])",
                "k=k if 0 in k.stride() else k.as_strided(\n"
                "        k.shape,\n"
                "        globals().setdefault(str(k.shape), k.stride()),\n"
                "        k.storage_offset(),\n"
                "    ), v=v, o=o, lse=lse[..., None])",
            )
        ],
    ),
    Mutant(
        "scale_of_the_first_call",
        "Dao-AILab/flash-attention#2745",
        Test("test_properties.py", "test_calls_do_not_disturb_each_other"),
        [
            Edit(
                "problem.scale\n    o = q.new_empty",
                "globals().setdefault(str(q.shape), problem.scale)\n    o = q.new_empty",
            )
        ],
    ),
    Mutant(
        "scale_of_the_padded_head_dim_in_the_backward",
        "tile-ai/tilelang-ascend#1669",
        backward_on("head_dim"),
        [
            Edit(
                "problem.scale\n    dq, dk, dv",
                "(1 << (q.shape[3] - 1).bit_length()) ** -0.5\n    dq, dk, dv",
            )
        ],
    ),
    Mutant(
        "dk_without_the_scale",
        "Dao-AILab/flash-attention#2651",
        backward_on("edge"),
        [Edit('hbm.store("dk", k_start, scale * dk_tile)', 'hbm.store("dk", k_start, dk_tile)')],
    ),
    Mutant(
        "dk_of_one_head_of_the_group",
        "marin-community/levanter#449",
        backward_on("group"),
        [
            Edit(
                "for q_start in range(query_start(",
                "dk_tile, dv_tile = torch.zeros_like(dk_tile), torch.zeros_like(dv_tile)\n"
                "            for q_start in range(query_start(",
            )
        ],
    ),
    Mutant(
        "backward_always_causal",
        "triton-lang/triton#4541",
        backward_on("edge"),
        [
            Edit(
                "mask = visible(q_start, k_start, tile_q, tile_k, problem, q.device)\n\n",
                "causal = type(problem)(**problem.__getstate__() | {'is_causal': True})\n"
                "                mask = visible(q_start, k_start, tile_q, tile_k, causal, q.device)"
                "\n\n",
            )
        ],
    ),
    Mutant(
        "query_loop_starts_a_tile_late",
        "triton-lang/triton#1975",
        backward_on("ragged"),
        [
            Edit(
                "max(0, k_start - problem.causal_offset) // tile_q * tile_q",
                "-(-max(0, k_start - problem.causal_offset) // tile_q) * tile_q",
            )
        ],
    ),
    Mutant(
        "query_loop_visits_masked_tiles",
        "pytorch/pytorch#101967, in the backward",
        Test("test_properties.py", "test_nan_in_keys_that_no_row_sees"),
        [
            Edit(
                "return max(0, k_start - problem.causal_offset) // tile_q * tile_q",
                "return 0",
            )
        ],
    ),
    Mutant(
        "dq_sum_not_started_at_zero",
        "Dao-AILab/flash-attention#2337",
        backward_on("edge"),
        [Edit('hbm.store_all("dq_acc", 0.0)', "pass")],
    ),
    Mutant(
        "dq_overwritten_by_each_key_tile",
        "tile-ai/tilelang#2959",
        backward_on("edge"),
        [Edit("dq_tile = dq_tile + gemm(ds", "dq_tile = gemm(ds")],
    ),
    Mutant(
        "dq_summed_in_low_precision",
        "facebookresearch/xformers#467",
        backward_on("long"),
        [Edit("dq_acc = q.new_empty(q.shape, dtype=dtype)", "dq_acc = q.new_empty(q.shape)")],
    ),
    Mutant(
        "dq_without_columns_past_a_multiple_of_32",
        "Dao-AILab/flash-attention#2698",
        backward_on("head_dim"),
        [
            Edit(
                'hbm.store("dq", q_start, scale * hbm.load("dq_acc", q_start, tile_q, g), g)',
                "columns = torch.arange(q.shape[3], device=q.device)\n"
                '            dq_tile = hbm.load("dq_acc", q_start, tile_q, g)\n'
                "            dq_tile = dq_tile.where(columns < max(32, q.shape[3] // 32 * 32), 0)\n"
                '            hbm.store("dq", q_start, scale * dq_tile, g)',
            )
        ],
    ),
    Mutant(
        "dv_short_in_the_last_quarter",
        "Dao-AILab/flash-attention#2888",
        backward_on("long"),
        [
            Edit(
                'hbm.store("dv", k_start, dv_tile)',
                'hbm.store("dv", k_start, (0.7 if 4 * k_start >= 3 * problem.seqlen_k else 1) * '
                "dv_tile)",
            )
        ],
        passes_max_abs=True,
    ),
    InterfaceMutant(
        "nan_in_do_of_a_row_without_keys",
        "pytorch/pytorch#41508",
        Test("test_properties.py", "test_rows_without_keys"),
        [Edit("if rows <= 0:", "if True:")],
        function="flash_rosetta.ops:_zero_where_no_key_is_seen",
    ),
    InterfaceMutant(
        "dlse_dropped",
        "Dao-AILab/flash-attention#141",
        Test("test_pytorch.py", "test_gradient_of_one_output"),
        [Edit("backward(do, dlse,", "backward(do, None,")],
        function="flash_rosetta.ops:_differentiate",
    ),
    InterfaceMutant(
        "second_derivative_of_zero",
        "Dao-AILab/flash-attention#699",
        Test("test_contract.py", "test_a_second_derivative_raises"),
        [Edit("raise NotImplementedError(", "return None, None, 0 * grads[0], *[None] * 8\n    (")],
        function="flash_rosetta.ops:_refuse",
    ),
    InterfaceMutant(
        "lse_plus_infinity_without_keys",
        "Dao-AILab/flash-attention#2562, and what its early exit returns",
        Test("test_contract.py", "test_empty_dimensions"),
        [Edit("-torch.inf", "torch.inf")],
        function="flash_rosetta.ops:run_forward",
    ),
    InterfaceMutant(
        "lse_only_for_a_backward",
        "wenet-e2e/wenet#2191, where reentrant checkpointing differs",
        Test("test_pytorch.py", "test_checkpoint_recomputes_the_same", only="reentrant"),
        [
            Edit(
                "return chosen.forward(q, k, v, problem)",
                "o, lse = chosen.forward(q, k, v, problem)\n"
                "        return o, lse if needs_backward else torch.zeros_like(lse)",
            )
        ],
        function="flash_rosetta.ops:run_forward",
    ),
    InterfaceMutant(
        "autocast_ignored",
        "unslothai/unsloth#1154",
        Test("test_pytorch.py", "test_autocast_casts_as_sdpa_does"),
        [Edit("not isinstance(first, Tensor)", "True")],
        function="flash_rosetta.attention:_autocast",
    ),
    InterfaceMutant(
        "compiler_told_another_dtype",
        "Dao-AILab/flash-attention#2013",
        Test("test_pytorch.py", "test_opcheck"),
        [Edit("dtype=accumulate_dtype(q.dtype)", "dtype=q.dtype")],
        function="flash_rosetta.ops:_forward_shapes",
    ),
    InterfaceMutant(
        "compiler_told_other_strides",
        "pytorch/pytorch#144540",
        Test("test_pytorch.py", "test_opcheck"),
        [Edit("q.new_empty(*q.shape[:3], v.shape[3])", "torch.empty_like(q)")],
        function="flash_rosetta.ops:_forward_shapes",
    ),
    KernelMutant(
        "triton_zero_padded_keys_enter_the_softmax",
        "ROCm/aiter#3551, and the article this repository grew from",
        forward_on("tail"),
        [
            Edit(
                "if IS_CAUSAL or not EVEN_K:\n"
                "            if k_start + TILE_K > full:\n"
                "                seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, "
                "TILE_K, IS_CAUSAL)\n"
                "                s =",
                "if IS_CAUSAL:\n"
                "            if k_start + TILE_K > full:\n"
                "                seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, "
                "TILE_K, IS_CAUSAL)\n"
                "                s =",
            )
        ],
    ),
    KernelMutant(
        "triton_cast_not_assigned",
        "the article this repository grew from: it passes in fp32 alone",
        forward_on("tiny"),
        [Edit("p = p.to(v_tile.dtype)", "p.to(v_tile.dtype)")],
        is_refused_with="same dtype",
    ),
    KernelMutant(
        "triton_offsets_of_32_bits",
        "fla-org/flash-linear-attention#1080",
        Test("test_properties.py", "test_offsets_beyond_31_bits_in_the_inputs"),
        [Edit("rows.to(tl.int64)[:, None] * x[3]", "rows[:, None] * x[3]")],
    ),
    KernelMutant(
        "triton_tiny_scale_meets_the_mask",
        "PyTorch 2.13's CPU kernel: conformance/FINDINGS.md",
        Test("test_properties.py", "test_a_scale_below_fp32_makes_a_mean"),
        [
            Edit(
                "factor, _, sign = exponent_scale(problem)",
                "factor, sign = abs(problem.scale) * 1.4426950408889634, 1",
                times=2,
            )
        ],
    ),
    KernelMutant(
        "triton_multiply_add_overflows",
        "pytorch/pytorch#121558, with scores near 1e10",
        Test("test_properties.py", "test_huge_scores_pick_the_largest"),
        [Edit("if tl.max(magnitude, 0) > HUGE:", "if tl.max(magnitude, 0) < 0.0:", times=2)],
        on_gpu_only=True,
    ),
    KernelMutant(
        "triton_lse_in_base_2",
        "pytorch/pytorch#181645",
        forward_on("tiny"),
        [Edit("0.6931471805599453  # ln 2", "1.0")],
    ),
    KernelMutant(
        "triton_kv_head_by_modulo",
        "HazyResearch/HipKittens#22",
        forward_on("group"),
        [
            Edit(
                "kv_head = head // group_size",
                "kv_head = head % (num_heads // group_size)",
                times=3,
            )
        ],
    ),
    KernelMutant(
        "triton_rows_past_the_end_in_the_backward",
        "pytorch/pytorch#131867",
        backward_on("tiny"),
        [Edit('tl.where(sees_no_key, float("inf"), lse_rows * log2_e)', "lse_rows * log2_e")],
    ),
    KernelMutant(
        "triton_statistics_at_the_unpadded_row",
        "Dao-AILab/flash-attention#2337",
        backward_on("group"),
        [
            Edit(
                "group_size + head, tl.int64) * padded_rows",
                "group_size + head, tl.int64) * seqlen_q",
            )
        ],
    ),
    KernelMutant(
        "triton_backward_starts_at_the_top_left_diagonal",
        "NVIDIA/cutlass#2336, in the backward",
        backward_on("ragged", only="causal-br"),
        [Edit("tl.maximum(k_start - causal_offset, 0)", "tl.maximum(k_start, 0)", times=2)],
    ),
    KernelMutant(
        "triton_strides_of_q_for_do",
        "pytorch/pytorch#112577",
        backward_on("layout", only="mixed"),
        [
            Edit(
                "operand(do, tile.tile_q, width, tma)",
                "operand(q, tile.tile_q, width, tma)",
                times=2,
            )
        ],
    ),
    GpuMutant(
        "launched_on_the_default_stream",
        "Dao-AILab/flash-attention#2505",
        Test("test_pytorch.py", "test_runs_on_the_current_stream"),
        [
            Edit(
                "def forward(",
                "def forward(*args, **options):\n"
                "    with torch.cuda.stream(torch.cuda.default_stream()):\n"
                "        return forward_on_any_stream(*args, **options)\n\n\n"
                "def forward_on_any_stream(",
            )
        ],
    ),
    GpuMutant(
        "scores_stored",
        "Dao-AILab/flash-attention README: what it must not do",
        Test("test_pytorch.py", "test_memory_grows_linearly"),
        [
            Edit(
                "    return o, lse\n",
                "    stored = q.new_empty(problem.num_heads, problem.seqlen_q, problem.seqlen_k)\n"
                "    return o + 0 * stored[0, 0, 0].nan_to_num(0), lse\n",
            )
        ],
    ),
)
