"""Tests that take long: campaigns carry out LONG, of which shorter ones of the same kind exist, and ``make test-slow``
carries out SLOW."""

from __future__ import annotations

from collections.abc import Mapping

#: By file, the tests as pytest names them, with all their parameters where none are named.
LONG = {
    "tests/tasks/fitting/test_use.py": ("test_a_refit_makes_scores_stale_and_rollouts_are_scored_again[path]",),
    "tests/tasks/training/test_early_stop.py": ("test_a_kill_changes_nothing_of_it[1]",),
    "tests/tasks/stages/test_given.py": (
        "test_training_on_given_samples_changes_the_policy_and_resumes[dpo]",
        "test_training_on_given_samples_changes_the_policy_and_resumes[kto]",
    ),
    "tests/tasks/stages/test_start.py": ("test_the_start_is_part_of_the_policys_identity_and_outlives_its_run[full]",),
    "tests/tasks/fitting/test_fit.py": (
        "test_which_of_two_images_is_better_depends_on_the_prompt[none]",
        "test_which_of_two_images_is_better_depends_on_the_prompt[characters]",
    ),
    "tests/benchmarks/test_given_rows.py": ("test_all_figures_are_measured", "test_memory_does_not_grow_with_rows"),
    "tests/gpu/test_simulated.py": (
        "test_the_one_command_finds_all_as_it_must_be",
        "test_the_simulated_device_is_as_strict_as_a_gpu",
    ),
    "tests/tasks/stages/test_steer.py": (
        "test_a_kill_changes_nothing_of_a_branch",
        "test_an_alert_may_stop_a_run[warn]",
    ),
    "tests/models/weights/test_pretrained_loading.py": (
        "test_a_value_of_another_type_is_followed_or_refused_in_one_sentence[None]",
    ),
    "tests/tasks/modalities/test_chain_engines.py": ("test_a_restart_of_a_real_process_in_the_middle_changes_nothing",),
    "tests/test_cases.py": ("test_a_case_behaves[ddim_end_of_chain_is_level_zero.py]",),
    "tests/storage/artifacts/test_checksummed_json.py": (
        "test_flips_in_records_of_runs_and_artifacts_are_found_and_repaired",
    ),
    "tests/chaos/test_interruptions.py": (
        "test_a_killed_temporary_server_is_started_again",
        "test_a_second_process_on_the_same_run_is_refused",
    ),
    "tests/contracts/test_roots.py": (
        "TestS3::test_no_answer_is_named_within_seconds[silence]",
        "test_damage_is_noticed[s3 with faults-1048576-_version_1]",
        "test_damage_is_noticed[s3 with faults-1048576-_version_3]",
        "test_damage_is_noticed[s3 with faults-1048576-describe_file]",
        "test_damage_is_noticed[s3 with faults-4194304-_version_1]",
        "test_damage_is_noticed[s3 with faults-4194304-_version_3]",
        "test_damage_is_noticed[s3 with faults-4194304-describe_file]",
        "TestS3::test_no_answer_is_named_within_seconds[no listener]",
    ),
    "tests/contracts/test_schedulers.py": (
        "test_every_option_is_the_pipelines_or_refused_by_name[sdxl-DDIMScheduler]",
        "test_every_option_is_the_pipelines_or_refused_by_name[sdxl-DPMSolverMultistepScheduler]",
        "test_every_option_is_the_pipelines_or_refused_by_name[sdxl-EulerDiscreteScheduler]",
        "test_every_option_is_the_pipelines_or_refused_by_name[sdxl-PNDMScheduler]",
    ),
    "tests/flows/test_deployments.py": ("test_prefects_own_ways_to_deploy_replace_what_was_set_by_hand[deploy_file]",),
    "tests/flows/test_cli.py": (
        "test_two_processes_under_torchrun",
        "test_what_became_due_is_said_and_done",
        "test_an_evaluation_of_its_own_name",
        "test_transient_errors_are_retried_and_others_are_not",
        "test_one_stage_alone_with_another_reward",
        "test_a_nan_reward_is_one_message_and_the_next_try_keeps_the_rollouts",
    ),
    "tests/flows/test_command.py": (
        "test_a_signal_says_what_stays_and_how_to_go_on[training, SIGTERM]",
        "test_a_crowded_folder_does_not_break_the_command[plain]",
        "test_ranks_in_a_crowded_folder_run_ours",
    ),
    "tests/flows/test_prefect.py": (
        "test_a_shard_that_fails_is_tried_again_and_its_run_goes_on_by_the_command_it_names",
        "test_a_suspicion_pauses_the_deployment_that_trains",
        "test_the_server_imports_with_the_declared_dependencies",
    ),
    "tests/models/rewards/test_reward_server.py": (
        "test_too_many_samples_are_told_to_come_later",
        "test_requests_are_scored_together_and_one_that_fails_fails_alone",
    ),
    "tests/models/weights/test_sharding.py": ("test_groups_of_ranks_add_up_the_gradients_of_all[4]",),
    "tests/storage/maintenance/test_maintenance.py": (
        "test_nothing_is_removed_under_a_run_at_work[command1]",
        "test_policies_and_rollouts_of_a_run_that_is_ahead_stay[optimize]",
    ),
    "tests/storage/backends/test_s3.py": (
        "test_an_epoch_takes_at_most_56_requests",
        "test_a_run_moves_between_disk_and_s3",
        "test_the_command_line_on_s3",
        "test_a_run_on_s3_equals_one_on_disk[webdataset]",
    ),
    "tests/tasks/execution/test_launch.py": (
        "test_a_rank_that_hangs_is_named",
        "test_stopping_leaves_no_process[False]",
        "test_a_killed_caller_leaves_no_process[False]",
        "test_the_first_failing_rank_is_named",
        "test_every_shard_is_taken_once_whoever_is_late_or_slow",
        "test_lines_come_through",
        "test_a_rank_that_was_killed_is_named_though_others_failed_because_of_it",
        "test_a_rank_whose_parent_hangs_up_ends_though_it_is_busy",
        "test_spread_weights_train_as_whole_ones[full, one rank idle]",
        "test_a_rank_that_was_killed_is_named",
        "test_stopping_leaves_no_process[True]",
    ),
    "tests/tasks/execution/test_rendezvous.py": ("test_ranks_listen_on_loopback_alone[1]",),
    "tests/tasks/execution/test_resharding.py": (
        "test_a_checkpoint_of_several_ranks_goes_on_with_any_number[adamw-numbers0-held0]",
    ),
    "tests/tasks/execution/test_process_executor.py": (
        "test_a_failing_reward_is_named_and_a_killed_process_replaced",
        "test_processes_end_when_their_parent_is_killed",
        "test_closing_ends_what_is_scored_and_starts_nothing_more",
    ),
    "tests/tasks/execution/test_strategies.py": (
        "test_two_ranks_train_as_one_process[one machine-z_image-fsdp]",
        "test_two_ranks_train_as_one_process[one machine-sd15-fsdp]",
        "test_two_ranks_train_as_one_process[two agents-wan22-fsdp]",
        "test_two_ranks_train_as_one_process[one machine-wan22-fsdp, ulysses, fused]",
        "test_two_ranks_train_as_one_process[one machine-qwen_image-fsdp, spread]",
        "test_ranks_that_sample_in_step_need_not_take_equally_many_steps[branches-one machine]",
        "test_two_ranks_correct_rows_of_an_older_policy_as_one_process[means-fsdp-one machine]",
        "test_two_ranks_train_as_one_process[one machine-flux2-fsdp, offload]",
    ),
    "tests/tasks/export/test_export.py": (
        "test_the_snippet_of_lora_files_gives_the_evaluation",
        "test_the_snippet_of_a_whole_pipeline_gives_the_evaluation",
        "test_lora_files_of_two_processes_are_equal_byte_by_byte",
        "test_every_family_loads_from_its_exported_folder_alone[hunyuan_video15]",
    ),
    "tests/tasks/export/test_publish.py": (
        "test_a_card_the_hub_refuses",
        "test_refusals_say_what_to_do[ann/signs-given2-the token may not write to 'ann', or the repository is]",
        "test_refusals_say_what_to_do[ann/signs-given1-the Hub does not know this token]",
        "test_without_network_or_token_variable",
    ),
    "tests/tasks/metrics/test_sweep.py": (
        "test_a_sweep_that_is_stopped_leaves_no_process[2]",
        "test_a_sweep_samples_once_what_its_variants_share",
        "test_a_variant_that_fails_stops_no_other",
    ),
    "tests/tasks/inputs/test_weight_sources.py": ("test_a_run_over_sources_works_on_the_command_line",),
    "tests/tasks/modalities/test_modality.py": ("test_the_command_runs_it",),
    "tests/tasks/modalities/test_ppo.py": (
        "test_training_goes_on_from_its_files_as_from_memory[overrides1]",
        "test_training_goes_on_from_its_files_as_from_memory[overrides2]",
    ),
    "tests/tasks/modalities/test_render.py": ("test_a_run_of_the_command_draws_two_turns_and_shows",),
    "tests/tasks/modalities/test_turns.py": ("test_two_ranks_see_as_one",),
    "tests/tasks/training/test_training_stage.py": (
        "test_a_trainer_kept_in_memory_goes_on_as_one_that_was_read[adamw8bit]",
    ),
    "tests/tasks/checks/test_language_memory.py": (
        "test_every_role_has_a_line",
        "test_what_to_change_is_said",
        "test_ranks_that_share_the_weights_hold_less",
        "test_tensors_without_content_take_what_real_ones_do[dtype0-None-True]",
    ),
    "tests/tasks/checks/test_memory.py": (
        "test_check_says_whether_it_fits",
        "test_models_of_rewards_have_a_phase_of_their_own",
        "test_presets_with_quantized_weights_take_what_the_page_says[sd35_medium]",
        "test_full_size_presets_are_estimated_as_the_page_says[wan22_a14b]",
        "test_a_few_blocks_tell_what_all_of_them_take",
        "test_tensors_without_content_take_what_real_ones_do[sana]",
        "test_tensors_without_content_take_what_real_ones_do[sana_video]",
        "test_tensors_without_content_take_what_real_ones_do[hunyuan_video15]",
        "test_tensors_without_content_take_what_real_ones_do[flux3]",
        "test_tensors_without_content_take_what_real_ones_do[qwen_image21]",
        "test_tensors_without_content_take_what_real_ones_do[ltx2]",
        "test_tensors_without_content_take_what_real_ones_do[minimax_h3]",
        "test_tensors_without_content_take_what_real_ones_do[cogvideox]",
        "test_tensors_without_content_take_what_real_ones_do[qwen_image]",
        "test_tensors_without_content_take_what_real_ones_do[wan22_ti2v]",
        "test_tensors_without_content_take_what_real_ones_do[wan21]",
        "test_tensors_without_content_take_what_real_ones_do[sdxl]",
        "test_adapters_may_be_on_some_kinds_of_blocks_alone",
        "test_ranks_that_share_the_weights_hold_less",
    ),
    "tests/tasks/reports/test_benchmark.py": ("test_processes_share_the_work_and_change_no_figure",),
    "tests/tasks/reports/test_report.py": ("test_the_command_writes_and_logs_it",),
    "tests/tasks/runs/test_extension.py": ("test_the_command_line_trains_on",),
    "tests/tasks/runs/test_chain.py": ("test_a_thousand_epochs_are_planned_without_recursion",),
    "tests/tasks/stages/test_stages.py": (
        "test_every_algorithm_trains_and_equal_runs_are_equal[refl]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[awm]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[crd]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[flash_grpo]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[flow_dppo]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[grpo_guard]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[ram]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[tempflow]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[v_grpo]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[direct_align]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[reward_gradient]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[fdfo]",
        "test_every_algorithm_trains_and_equal_runs_are_equal[dgpo]",
    ),
    "tests/tasks/tracking/test_tracking.py": (
        "test_an_empty_database_is_made_once_and_copied[no folder]",
        "test_an_empty_database_is_made_once_and_copied[whole]",
        "test_a_broken_database_is_named_and_made_anew[empty]",
        "test_a_run_is_logged_to_another_tracker_too",
    ),
    "tests/test_docs.py": (
        "test_the_tutorial_works_as_pasted",
        "test_rewards_of_your_own_work_as_pasted",
        "test_python_works_as_pasted",
    ),
}

#: Tests of one process that take 4 s and more, by file: `make test` leaves them to `make test-slow`.
SLOW = {
    "tests/models/quickstart/test_looker.py": ("test_a_conversation_is_a_row_of_pre_training",),
    "tests/flows/test_tables.py": ("test_every_command_has_one_line_for_each_entry",),
    "tests/models/weights/test_pretrained_loading.py": (
        "test_a_value_of_another_type_is_followed_or_refused_in_one_sentence[text]",
    ),
    "tests/storage/maintenance/test_losses.py": ("test_every_lost_record_is_seen_and_put_back",),
    "tests/tasks/fitting/test_fit.py": ("test_which_of_two_images_is_better_depends_on_the_prompt[words]",),
    "tests/tasks/modalities/test_chain_engines.py": (
        "test_a_server_that_lost_its_weights_gets_them_again",
        "test_another_server_takes_over_from_one_that_is_gone_slow_cut_or_lies",
        "test_servers_draw_the_files_of_the_local_sampler",
        "test_whatever_is_stored_with_a_chain_is_computed_here[trained steps]",
    ),
    "tests/tasks/modalities/test_image_tokens.py": ("test_given_images_that_are_compared_or_rated_are_trained_on",),
    "tests/tasks/modalities/test_texts_shown.py": ("test_mlflow_has_them_as_tables",),
    "tests/tasks/modalities/test_turns.py": ("test_turns_depend_on_no_shard_and_an_interrupted_one_goes_on",),
    "tests/tasks/reports/test_benchmark.py": ("test_samples_are_those_of_the_pinned_settings_and_found_again",),
    "tests/tasks/reports/test_published.py": ("test_given_pairs_are_published_as_they_are_read",),
    "tests/tasks/runs/test_fingerprints.py": ("test_every_plain_setting_changes_the_stages_of_its_section_alone",),
    "tests/tasks/stages/test_asking.py": ("test_training_goes_on_after_a_kill_and_does_not_depend_on_micro_batches",),
    "tests/tasks/stages/test_edits.py": ("test_edits_come_from_tars_and_as_pairs",),
    "tests/tasks/stages/test_given.py": (
        "test_a_file_that_cannot_be_decoded_is_named_or_left_out[half a JPEG]",
        "test_images_of_several_sizes_train_in_buckets",
        "test_training_on_given_samples_changes_the_policy_and_resumes[sft]",
    ),
    "tests/tasks/stages/test_last_frame.py": ("test_a_whole_run_exports_a_call_that_ends_with_the_last_image",),
    "tests/tasks/stages/test_sampling.py": (
        "test_evaluations_do_not_depend_on_shards",
        "test_rewards_that_compare_get_whole_groups_of_what_was_cut",
    ),
    "tests/tasks/stages/test_single_file.py": (
        "test_a_run_starts_from_a_file_and_its_content_alone_is_part_of_what_the_base_is",
    ),
    "tests/tasks/stages/test_stages.py": (
        "test_every_algorithm_trains_and_equal_runs_are_equal[sft]",
        "test_finished_is_known_without_a_model_and_forgotten_when_anything_changes",
        "test_training_resumes_from_the_checkpoint_within_the_epoch[ema]",
    ),
    "tests/tasks/stages/test_start.py": ("test_the_start_is_part_of_the_policys_identity_and_outlives_its_run[lora]",),
    "tests/tasks/stages/test_steer.py": (
        "test_a_branch_starts_from_the_best_policy_before",
        "test_an_alert_may_stop_a_run[stop]",
    ),
    "tests/tasks/training/test_early_stop.py": ("test_a_kill_changes_nothing_of_it[0]",),
    "tests/tasks/training/test_training.py": (
        "test_the_rate_is_used_and_logged_whatever_interrupts_the_run",
        "test_the_scale_survives_a_kill_and_the_end_of_an_epoch",
    ),
    "tests/tasks/training/test_training_stage.py": (
        "test_a_fused_optimizer_takes_the_same_steps_and_goes_on_with_them",
        "test_an_epoch_trains_on_itself_and_on_what_it_replays",
        "test_the_first_update_uses_what_the_rollout_predicted_without_the_prompt[all]",
    ),
}


def is_in(table: Mapping[str, tuple[str, ...]], nodeid: str) -> bool:
    """Return whether a table holds a test."""
    path, _, name = nodeid.partition("@")[0].partition("::")
    return any(name == each or name.startswith(f"{each}[") for each in table.get(path, ()))
