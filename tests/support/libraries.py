"""Tests that use the libraries that flowmill requires, for ``make test-newest`` and ``make test-lowest``.

``python -m tests.support.libraries`` prints them as arguments of pytest. Every requirement has tests, see
``tests/test_requirements.py``.
"""

from __future__ import annotations

TESTS = {
    "torch": [
        "tests/golden/test_golden.py",
        "tests/contracts/test_policies.py::test_a_training_step_lowers_the_loss_and_reaches_every_parameter",
    ],
    "diffusers": ["tests/contracts/test_policies.py::test_ode_equals_the_pipeline"],
    "transformers": [
        "tests/models/policies/test_language_classes.py",
        "tests/models/policies/test_vision_lm.py",
        "tests/models/text/test_continuations.py",
    ],
    "peft": ["tests/contracts/test_lora_start.py::test_what_plain_peft_wrote_computes_as_there"],
    "accelerate": ["tests/contracts/test_policies.py::test_a_model_made_empty_reads_the_weights_that_loading_gives"],
    "safetensors": [
        "tests/models/weights/test_pretrained_loading.py::test_policies_critics_and_empty_models_refuse_nan_weights"
    ],
    "huggingface-hub": ["tests/tasks/inputs/test_hub.py"],
    "numpy": ["tests/golden/test_steps.py"],
    "pillow": ["tests/models/test_image_files.py"],
    "scikit-learn": ["tests/contracts/test_rewards.py::test_digits_are_read"],
    "scipy": ["tests/tasks/metrics/test_sweep.py::test_the_mean_over_seeds_has_students_interval"],
    "joblib": ["tests/tasks/execution/test_process_executor.py::test_processes_give_the_scores_of_one_thread"],
    "pyarrow": ["tests/contracts/test_trajectory_stores.py"],
    "datasets": ["tests/tasks/inputs/test_data_rows.py"],
    "webdataset": ["tests/tasks/reports/test_streams.py"],
    "s3fs": ["tests/contracts/test_roots.py::TestS3::test_what_either_client_writes_both_read_and_list"],
    "obstore": ["tests/contracts/test_roots.py::TestS3::test_what_either_client_writes_both_read_and_list"],
    "packaging": ["tests/tasks/execution/test_runners.py::test_a_runner_whose_package_is_older_says_what_to_install"],
    "xxhash": ["tests/storage/backends/test_file_hash_cache.py"],
    "psutil": ["tests/storage/backends/test_leases.py::test_a_dead_process_of_this_machine_holds_nothing"],
    "pydantic": ["tests/configs/test_configs.py", "tests/flows/test_options.py"],
    "pyyaml": ["tests/configs/test_presets.py::test_a_preset"],
    "typer": ["tests/flows/test_command.py::test_version_and_completion", "tests/flows/test_options.py"],
    "rich": ["tests/flows/test_tables.py"],
    "prefect": [
        "tests/flows/test_prefect.py::test_the_server_imports_with_the_declared_dependencies",
        "tests/flows/test_prefect.py::test_every_flow_is_deployed_with_a_form_for_what_it_takes",
    ],
    "fastapi": ["tests/models/rewards/test_reward_server.py::test_a_served_reward_keeps_the_contract"],
    "sqlalchemy": ["tests/flows/test_prefect.py::test_every_flow_is_deployed_with_a_form_for_what_it_takes"],
    "mlflow": ["tests/tasks/tracking/test_tracking.py::test_a_run_in_mlflow"],
    "httpx": ["tests/models/engines/test_openai.py"],
    "tenacity": ["tests/models/rewards/test_reward_server.py::test_a_served_reward_keeps_the_contract"],
    "msgpack": ["tests/models/rewards/test_reward_server.py::test_a_served_reward_keeps_the_contract"],
    "jinja2": ["tests/tasks/reports/test_report.py", "tests/models/text/test_chat_templates.py"],
    "rapidocr-onnxruntime": ["tests/contracts/test_rewards.py::test_words_are_read_by_real_ocr"],
    "av": ["tests/models/test_films.py"],
    "ftfy": ["tests/contracts/test_policies.py::test_ode_equals_the_pipeline"],
    "deltalake": ["tests/storage/maintenance/test_maintenance.py::test_a_run_is_exported_as_one_table"],
    "duckdb": ["tests/contracts/test_trajectory_stores.py"],
    "prefect-dask": ["tests/tasks/execution/test_runners.py"],
    "prefect-ray": ["tests/tasks/execution/test_runners.py"],
    "torchao": ["tests/tasks/training/test_optimizers.py", "tests/models/weights/test_quantized.py"],
    "bitsandbytes": ["tests/models/weights/test_quantized.py"],
    "regex": ["tests/models/rewards/test_vlm_judge.py"],
    "vadersentiment": ["tests/models/rewards/test_text_rewards.py"],
    "streamlit": ["tests/flowmill/test_explorer.py"],
    "mkdocs": ["tests/test_docs.py::test_the_site_is_built_without_a_broken_link"],
    "mkdocs-material": ["tests/test_docs.py::test_the_site_is_built_without_a_broken_link"],
    "uvicorn": ["tests/models/rewards/test_reward_server.py::test_a_served_reward_keeps_the_contract"],
    "prometheus-client": ["tests/models/rewards/test_reward_server.py::test_a_served_reward_keeps_the_contract"],
}


if __name__ == "__main__":
    print(*sorted({test for tests in TESTS.values() for test in tests}))  # noqa: T201
