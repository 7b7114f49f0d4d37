"""Tests and cases that the ordinary suite leaves to `pytest -m slow`.

The ordinary suite should take less than 20 minutes on two cores. Whatever is listed
here is marked as slow; other tests cover most of it with fewer compiled programs.
"""

from collections.abc import Sequence, Set
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
# Of these tests, the first and the last case are run. Each case compiles programs of
# its own, and other tests compare the same variants, or their parts, with their
# equations.
TWO_CASES = (
    "integration/test_export.py::test_models",
    "integration/test_launch.py::test_local_restarts_unless_the_user_must_act",
    "integration/test_nnx.py::test_every_model_passes_the_bridge",
    "models/kernels/test_accelerators.py::test_cudnn_attention_is_the_reference_if_cudnn_computes_what_jax_says",
    "models/kernels/test_accelerators.py::test_splash_attention_is_the_reference",
    "models/kernels/test_blocked.py::test_equals_the_reference",
    "models/kernels/test_chunks.py::test_chunks_give_the_value_and_the_gradient_of_the_plain_form",
    "models/kernels/test_chunks.py::test_each_device_takes_chunks_of_its_rows",
    "models/kernels/test_products.py::test_bfloat16_products_rounds_operands_and_cotangents_and_nothing_else",
    "models/kernels/test_products.py::test_products_and_their_gradients_have_the_types_that_are_asked_for",
    "models/kernels/test_products.py::test_tangents_and_second_derivatives",
    "models/kernels/test_short.py::test_short_attention_is_the_reference",
    "models/kernels/test_short.py::test_short_attention_keeps_sentences_of_a_block_apart",
    "models/test_attention.py::test_a_prompt_and_then_single_steps_give_what_the_whole_gives",
    "models/test_attention.py::test_grouped_queries_are_heads_with_copied_keys_and_values",
    "models/test_bert.py::test_classifiers_of_tokens_and_of_features",
    "models/test_bert.py::test_dropout_acts_when_given_a_key",
    "models/test_bert.py::test_heads_of_pretraining",
    "models/test_bert.py::test_what_sees_what",
    "models/test_checks.py::test_wrong_ids_are_refused",
    "models/test_checks.py::test_wrong_validity_is_refused",
    "models/test_convs2s.py::test_forward_flops",
    "models/test_convs2s.py::test_gradients",
    "models/test_convs2s.py::test_pieces_of_any_length_give_the_logits_of_the_whole",
    "models/test_convs2s.py::test_the_model_is_its_equations",
    "models/test_encoder_decoder.py::test_hypotheses_that_continue_others_have_the_logits_of_their_own_tokens",
    "models/test_encoder_decoder.py::test_repeated_rows_share_what_the_decoder_reads_of_the_source",
    "models/test_gpt.py::test_a_cache_gives_the_logits_of_the_whole",
    "models/test_gpt.py::test_documents_packed_in_rows_are_like_separate_ones",
    "models/test_gpt.py::test_dropout_acts_when_given_a_key",
    "models/test_gpt.py::test_other_ways_to_the_same",
    "models/test_gpt.py::test_rows_of_a_cache_may_begin_at_different_places",
    "models/test_gpt.py::test_the_model_is_the_equations",
    "models/test_gpt.py::test_what_sees_what",
    "models/test_layers_transformations.py::test_layers",
    "models/test_positions.py::test_a_prompt_and_then_pieces_give_what_the_whole_gives",
    "models/test_positions.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole",
    "models/test_positions.py::test_hypotheses_of_a_beam_have_the_logits_of_their_own_tokens",
    "models/test_positions.py::test_what_sees_what",
    "models/test_recurrent.py::test_beams_share_their_source",
    "models/test_recurrent.py::test_bfloat16",
    "models/test_recurrent.py::test_forward_flops",
    "models/test_recurrent.py::test_gradients",
    "models/test_recurrent.py::test_model_is_its_equations",
    "models/test_recurrent_encoders.py::test_a_sentence_in_a_batch_is_that_sentence_by_the_equations",
    "models/test_t5.py::test_each_rate_of_dropout_acts_when_given_a_key",
    "models/test_transformer.py::test_dropout_acts_when_given_a_key_wherever_it_has_a_rate",
    "models/test_transformer.py::test_the_model_is_the_equations",
    "tasks/test_fine_tuning.py::test_a_model_learns_a_dozen_examples",
    "tasks/test_transcription.py::test_an_output_does_not_depend_on_the_other_recordings",
    "tasks/test_transcription.py::test_scores_of_a_search_are_those_of_the_loss",
    "test_conversion.py::test_there_and_back",
    "test_exporting.py::test_the_program_gives_what_the_task_gives",
    "test_transfer.py::test_a_head_with_other_outputs_starts_anew",
    "test_transfer.py::test_the_embeddings_and_the_first_layers_are_taken",
    "test_transfer_vectors.py::test_each_vector_is_what_the_model_reads_for_its_word",
    "test_transfer_vectors.py::test_only_frozen_vectors_keep_their_values",
    "test_workdir.py::test_which_keys_may_change_follows_from_their_fields",
    "training/test_engine.py::test_microbatches_give_the_loss_and_the_gradient_of_the_whole_batch",
    "training/test_optimizer_table.py::test_heads_are_trained_as_one_matrix",
    "training/test_optimizer_table.py::test_the_layers_of_a_stack_are_trained_as_if_alone",
    "training/test_optimizer_table.py::test_updates_are_counted",
    "training/test_sharding.py::test_every_axis_of_a_parameter_has_a_rule",
    "training/test_watching.py::test_every_kind_of_model_is_watched",
)
# Long tests and cases: trainings whose steps, data and files other tests check one by
# one, and variants of a model of which another one is run.
LONG = (
    "claims/test_collapse.py::test_outputs_of_the_encoder",
    "claims/test_features.py::test_each_tag_depends_on_features_on_both_sides",
    "claims/test_features.py::test_tags_do_not_depend_on_padding",
    "claims/test_features.py::test_the_features_are_those_of_all_chosen_layers",
    "claims/test_grokking.py::test_a_run_measures_its_steps",
    "claims/test_norms.py::test_the_loss_of_batch_norm_has_fixed_statistics",
    "claims/test_trained.py::test_a_run_that_diverges_measures_what_the_condition_says",
    "claims/test_trained.py::test_a_training_starts_from_another_one",
    "claims/test_trained.py::test_conditions_that_differ_in_their_score_share_a_training",
    "claims/test_trained.py::test_overrides_act_on_the_score_and_not_on_the_training",
    "claims/test_trained.py::test_the_score_is_a_function_of_the_trained_model",
    "compilation/test_description.py::test_the_longest_stream_decides_the_length_and_the_size_of_a_batch",
    "compilation/test_description.py::test_the_loss_of_a_sound_has_the_positions_of_its_text",
    "compilation/test_topologies.py::test_every_family_compiles[v5e:2x2-train-sequence_to_sequence,recurrent]",
    "compilation/test_topologies.py::test_short_attention_compiles_for_tpus[64-v5e:1x1-0.1]",
    "compilation/test_topologies.py::test_splash_attention_compiles_for_tpus[v5e:2x2-2-4]",
    "decoding/test_search.py::test_search_takes_the_options",
    "integration/abuses/test_train.py::test_a_disk_that_fills_before_the_first_save_is_one_message",
    "integration/test_blimp.py::test_a_trained_run[bert_pretraining]",
    "integration/test_claims.py::test_a_claim_can_be_tested[activations]",
    "integration/test_claims.py::test_a_claim_can_be_tested[addition]",
    "integration/test_claims.py::test_a_claim_can_be_tested[auxiliary]",
    "integration/test_claims.py::test_a_claim_can_be_tested[averaging]",
    "integration/test_claims.py::test_a_claim_can_be_tested[beam]",
    "integration/test_claims.py::test_a_claim_can_be_tested[concatenated]",
    "integration/test_claims.py::test_a_claim_can_be_tested[dot-at-small-size]",
    "integration/test_claims.py::test_a_claim_can_be_tested[dropout]",
    "integration/test_claims.py::test_a_claim_can_be_tested[features]",
    "integration/test_claims.py::test_a_claim_can_be_tested[grokking]",
    "integration/test_claims.py::test_a_claim_can_be_tested[heads]",
    "integration/test_claims.py::test_a_claim_can_be_tested[induction]",
    "integration/test_claims.py::test_a_claim_can_be_tested[key-width]",
    "integration/test_claims.py::test_a_claim_can_be_tested[layers]",
    "integration/test_claims.py::test_a_claim_can_be_tested[length]",
    "integration/test_claims.py::test_a_claim_can_be_tested[masking]",
    "integration/test_claims.py::test_a_claim_can_be_tested[next-sentence]",
    "integration/test_claims.py::test_a_claim_can_be_tested[norms]",
    "integration/test_claims.py::test_a_claim_can_be_tested[parallel]",
    "integration/test_claims.py::test_a_claim_can_be_tested[reversal]",
    "integration/test_claims.py::test_a_claim_can_be_tested[scaling]",
    "integration/test_claims.py::test_a_claim_can_be_tested[shared-maps]",
    "integration/test_claims.py::test_a_claim_can_be_tested[size]",
    "integration/test_claims.py::test_a_claim_can_be_tested[smoothing]",
    "integration/test_configs.py::test_recipe_runs[convs2s-]",
    "integration/test_configs.py::test_recipe_runs[gpt-lstm]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/extending/objective_use.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/extending/score.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/extending/source.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/from_flax_transformers.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/generation.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/layers_elsewhere.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/looking_inside.md]",
    "integration/test_docs.py::test_code_runs_and_prints_what_the_page_says[docs/using_layers.md]",
    "integration/test_interface.py::test_a_split_is_evaluated_in_one_pass_that_meets_every_example_once[electra_pretraining]",
    "integration/test_interface.py::test_a_split_is_evaluated_in_one_pass_that_meets_every_example_once[transcription]",
    "integration/test_interface.py::test_predictions_come_in_order_whatever_the_batch[transcription]",
    "integration/test_interface.py::test_the_terms_of_the_loss_are_means[electra_pretraining]",
    "integration/test_interface.py::test_the_terms_of_the_loss_are_means[transcription]",
    "integration/test_interface.py::test_what_looks_at_what_has_a_token_for_every_weight[transcription]",
    "integration/test_mesh.py::test_eight_devices_train_t5_as_one",
    "integration/test_mesh.py::test_gradients_of_other_encoder_decoders_are_those_of_one_device[convs2s-]",
    "integration/test_mesh.py::test_the_loss_runs_under_pmap_too",
    "integration/test_nnx.py::test_every_model_passes_the_bridge[TokenClassifier]",
    "integration/test_nnx.py::test_training_with_nnx_lowers_the_loss",
    "integration/test_records.py::test_the_best_entry_can_be_run[multi30k-22]",
    "integration/test_records.py::test_the_best_entry_can_be_run[scan-26]",
    "integration/test_scripts.py::test_two_processes_predict_and_score_as_one",
    "models/kernels/test_accelerators.py::test_eight_devices_compute_what_one_does[splash-1x2x128x8-]",
    "models/kernels/test_accelerators.py::test_splash_attention_is_the_reference[causal-2-2-128]",
    "models/kernels/test_checks.py::test_auto_takes_the_short_kernel_only_if_its_check_passes[False]",
    "models/kernels/test_checks.py::test_auto_takes_the_short_kernel_only_if_its_check_passes[True]",
    "models/kernels/test_checks.py::test_kernels_of_the_platform_are_compared_with_the_reference",
    "models/kernels/test_chunks.py::test_chunks_on_eight_devices",
    "models/kernels/test_short.py::test_short_attention_is_the_reference[none-3-3-64]",
    "models/test_bert.py::test_everything_starts_small",
    "models/test_convs2s.py::test_forward_mode",
    "models/test_convs2s.py::test_gradients[{'encoder_kernel_width': 5, 'decoder_kernel_width': 4}]",  # noqa: E501
    "models/test_convs2s.py::test_gradients[{}]",
    "models/test_gpt.py::test_a_cache_gives_the_logits_of_the_whole[{'positions': 'sinusoidal'}]",  # noqa: E501
    "models/test_gpt.py::test_documents_packed_in_rows_are_like_separate_ones[learned]",
    "models/test_gpt.py::test_everything_starts_small",
    "models/test_gpt.py::test_other_ways_to_the_same[parts5-changes5]",
    "models/test_gpt.py::test_rows_of_a_cache_may_begin_at_different_places[sinusoidal]",
    "models/test_positions.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole[relative]",
    "models/test_positions.py::test_half_precision_stays_near[relative]",
    "models/test_positions.py::test_what_sees_what[relative]",
    "models/test_stack.py::test_layers_without_a_loop_are_those_of_a_loop[none]",
    "models/test_stack.py::test_pieces_with_a_cache_give_the_causal_whole[False]",
    "models/test_t5.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole[v1_0]",
    "models/test_t5.py::test_initial_values[v1_0]",
    "models/test_transformer.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole[pre]",
    "models/test_transformer.py::test_other_ways_to_the_same",
    "models/test_transformer.py::test_rows_that_share_a_source_read_it_once",
    "records/test_entry.py::test_an_entry_is_trained_and_measured_once",
    "tasks/test_bert_pretraining.py::test_losses_and_accuracies_are_those_of_a_loop[False]",
    "tasks/test_bert_pretraining.py::test_masks_are_filled_with_the_most_probable_tokens[True]",
    "tasks/test_chosen_scores.py::test_a_run_chooses_its_best_step_by_gleu",
    "tasks/test_classification.py::test_a_premise_against_three_hypotheses",
    "tasks/test_continuations.py::test_a_continuation_is_what_the_model_finds_most_probable_after_the_prompt[recurrent_lm]",
    "tasks/test_continuations.py::test_continuations_are_shown_while_they_are_written",
    "tasks/test_denoising.py::test_a_run_is_evaluated_predicts_and_is_fine_tuned",
    "tasks/test_fine_tuning.py::test_a_model_learns_a_dozen_examples[choice]",
    "tasks/test_fine_tuning.py::test_a_model_learns_a_dozen_examples[text]",
    "tasks/test_inputs.py::test_it_trains_and_its_attention_is_drawn",
    "tasks/test_inputs_mesh.py::test_eight_devices_train_as_one[captions-photographs]",
    "tasks/test_inputs_mesh.py::test_eight_devices_train_several_decoders_as_one",
    "tasks/test_language_modeling.py::test_a_run_on_text_that_was_encoded_line_by_line_goes_on_if_the_ids_are_the_same",
    "tasks/test_language_modeling.py::test_a_tfds_data_set_is_documents[windows]",
    "tasks/test_pseudo_likelihood.py::test_a_score_is_the_sum_over_masked_tokens[causal]",
    "tasks/test_sequence_to_sequence.py::test_drawn_outputs_depend_on_seed_and_line_not_on_the_batch",
    "tasks/test_sequence_to_sequence.py::test_tokenizers_of_others_with_any_special_ids",
    "tasks/test_sequence_to_sequence_mixture.py::test_a_mixture_continues_where_it_stopped",
    "tasks/test_sequence_to_sequence_recurrent.py::test_trains_resumes_and_translates",
    "tasks/test_several_decoders.py::test_it_is_trained_scored_and_used_in_each_direction",
    "tasks/test_transcription.py::test_an_output_does_not_depend_on_the_other_recordings[joint-options2]",
    "tasks/test_transcription.py::test_scores_of_a_search_are_those_of_the_loss[convolutions]",
    "test_conversion.py::test_a_tokenizer_that_cannot_be_written",
    "test_conversion_bart.py::test_there_and_back[MBart]",
    "test_conversion_encoders.py::test_fine_tuning_on_pairs",
    "test_conversion_encoders.py::test_there_and_back[XLMRoberta]",
    "test_conversion_marian.py::test_there_and_back[one-all]",
    "test_conversion_t5.py::test_there_and_back[v1_0]",
    "test_conversion_training.py::test_fine_tuning_by_the_recipe_for_own_files",
    "test_conversion_training.py::test_training_a_language_model_further",
    "test_exporting.py::test_the_program_gives_what_the_task_gives[classification-None-changes0-options0]",
    "test_inside.py::test_the_output_is_that_of_the_task[recurrent]",
    "test_sweep.py::test_a_run_is_an_ordinary_workdir",
    "test_transfer.py::test_a_chain_of_runs",
    "test_transfer.py::test_a_resumed_run_needs_the_source_no_more",
    "test_transfer.py::test_every_task_takes_the_tokenizers_and_all_parameters[language_modeling]",
    "test_transfer.py::test_only_the_embeddings_of_special_tokens_are_new_to_a_language_model",
    "test_transfer.py::test_the_embeddings_and_the_first_layers_are_taken[gpt-1]",
    "test_transfer_huggingface.py::test_train_and_predict",
    "test_transfer_lora.py::test_predictors_have_merged_weights_and_the_scores_of_the_training",
    "test_transfer_lora.py::test_the_base_stays_that_of_the_folder",
    "test_transfer_vectors.py::test_a_workdir_needs_the_file_no_more",
    "test_transfer_vectors.py::test_only_frozen_vectors_keep_their_values[classification-bert-True]",
    "training/test_divergence.py::test_parameters_that_are_not_finite_are_not_saved",
    "training/test_divergence.py::test_ruined_parameters_are_never_a_checkpoint",
    "training/test_engine.py::test_microbatches_give_the_loss_and_the_gradient_of_the_whole_batch[6]",
    "training/test_engine.py::test_the_stored_values_notice_one_percent_of_the_embeddings_scale",
    "training/test_engine_average.py::test_it_is_resumed_bitwise_and_evaluated_by_those_who_ask_for_it",
    "training/test_freezing.py::test_frozen_layers_and_embeddings_keep_their_values[microbatches, average]",  # noqa: E501
    "training/test_freezing.py::test_the_gradient_norm_is_that_of_what_is_trained",
    "training/test_interruption.py::test_a_run_asked_to_stop_before_its_first_step_takes_none",
    "training/test_interruption.py::test_a_run_asked_to_stop_while_it_compiles_does_not_wait",
    "training/test_keeping.py::test_a_run_asked_to_stop_during_an_evaluation_saves_first",
    "training/test_location.py::test_a_workdir_that_is_moved_while_it_trains[True]",
    "training/test_loop.py::test_a_profile_of_steps_that_do_not_come_is_announced_as_none",
    "training/test_loop.py::test_the_rate_goes_by_the_steps_that_were_not_skipped",
    "training/test_metric.py::test_the_best_step_of_a_users_task_has_the_lowest_error_rate",
    "training/test_optimizer_table.py::test_it_learns_and_continues_bitwise[adafactor]",
    "training/test_optimizer_table.py::test_updates_are_counted[adafactor]",
    "training/test_scoring.py::test_scores_that_do_not_mean_the_same_are_not_compared",
)
# Of the longest tests of all tasks: variants whose code other variants share.
SAME_CODE = tuple(
    f"integration/test_interface.py::{test}[{variant}]"
    for test in (
        "test_a_dummy_batch_is_like_a_real_one",
        "test_a_dummy_batch_without_references_is_like_one_of_records",
        "test_a_split_is_evaluated_in_one_pass_that_meets_every_example_once",
        "test_predictions_come_in_order_whatever_the_batch",
        "test_the_terms_of_the_loss_are_means",
        "test_what_looks_at_what_has_a_token_for_every_weight",
    )
    for variant in (
        "bert_pretraining",
        "convolutions",
        "multiple choice of GPT",
        "multiple_choice",
        "regression",
        "several_decoders",
    )
)
# Recipes whose model and task are trained in tests/tasks. They are run with --quick,
# which leaves out tests/tasks.
TRAINED_ELSEWHERE = (
    "integration/test_configs.py::test_recipe_runs[bert-mini]",
    "integration/test_configs.py::test_recipe_runs[captions-photographs]",
    "integration/test_configs.py::test_recipe_runs[denoising-objective=text_infilling]",
    "integration/test_configs.py::test_recipe_runs[electra-mini]",
    "integration/test_configs.py::test_recipe_runs[finetune-task=sick]",
    "integration/test_configs.py::test_recipe_runs[finetune-task=squad2]",
    "integration/test_configs.py::test_recipe_runs[finetune-task=stsb]",
    "integration/test_configs.py::test_recipe_runs[finetune-task=swag]",
    "integration/test_configs.py::test_recipe_runs[finetune-task=wnut17]",
    "integration/test_configs.py::test_recipe_runs[gpt-llama-tiny]",
    "integration/test_configs.py::test_recipe_runs[languages-pivot,decoders=each]",
    "integration/test_configs.py::test_recipe_runs[speech-model=ctc]",
    "integration/test_configs.py::test_recipe_runs[t5-mini]",
    "integration/test_configs.py::test_recipe_runs[ted_hrlr-]",
    "integration/test_configs.py::test_recipe_runs[text_to_text-]",
)


def name_of(item: pytest.Item) -> str:
    """Return the file, relative to tests/, and the name without the case."""
    return f"{item.path.relative_to(FOLDER)}::{item.name.partition('[')[0]}"


def slow_cases(test: str, cases: Sequence[str], listed: Set[str]) -> set[str]:
    """Return the names of those of the `cases` of `test` that are slow."""
    if test in listed:
        return set(cases)
    file = test.partition("::")[0]
    slow = {case for case in cases if f"{file}::{case}" in listed}
    return slow | set(cases[1:-1]) if test in TWO_CASES else slow


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    listed = {*LONG, *SAME_CODE}
    if not config.getoption("quick"):
        listed |= {*TRAINED_ELSEWHERE}
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if FOLDER in item.path.parents and not item.get_closest_marker("slow"):
            tests.setdefault(name_of(item), []).append(item)
    for test, cases in tests.items():
        slow = slow_cases(test, [case.name for case in cases], listed)
        for case in cases:
            if case.name in slow:
                case.add_marker(pytest.mark.slow)
