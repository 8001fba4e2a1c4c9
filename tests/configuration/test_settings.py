"""Every AGGREGATOR_ variable: its default, its effect through the entrypoints, and the error for a wrong value."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import Anabranch, Endpoint, Settings, Status
from anabranch.configuration.settings import NEEDS, PREFIX, SWITCHED_SURFACES, VARIABLES, load, unknown
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation
from anabranch.testing import Document, Hub, Space
from conftest import parse_sse, ref
from support.environment import LOCAL, loaded, opened, served

pytestmark = pytest.mark.usefixtures("isolated_home")

PROMPT = "What is an anabranch?"
TESTS = Path(__file__).parents[1]

DEFAULTS: dict[str, object] = {
    "debug": False,
    "host": "0.0.0.0",
    "port": 8001,
    "workers": 1,
    "log_level": "INFO",
    "log_format": "json",
    "retrieval_timeout": 30.0,
    "generation_timeout": 120.0,
    "total_timeout": 180.0,
    "default_top_k": 5,
    "max_top_k": 20,
    "max_data_sources": 10,
    "max_context_tokens": 32_000,
    "max_request_bytes": 4 * 1024 * 1024,
    "max_reply_bytes": 4 * 1024 * 1024,
    "model_streaming_enabled": False,
    "heartbeat_interval": 15.0,
    "drain_timeout": 30.0,
    "shutdown_delay": 1.0,
    "chat_enabled": True,
    "query_enabled": True,
    "rag_enabled": True,
    "openai_enabled": True,
    "knowledge_enabled": True,
    "endpoints_enabled": True,
    "planner_enabled": True,
    "mcp_enabled": True,
    "page_enabled": True,
    "cors_origins": ("*",),
    "syfthub_url": "http://localhost:8000",
    "auth": "auto",
    "endpoint_allowlist": (),
    "endpoint_allowlist_public": False,
    "trusted_proxies": (),
    "syfthub_jwks_cache_ttl": 3600.0,
    "jwt_audience": None,
    "data_dir": "~/.local/share/anabranch",
    "default_visibility": None,
    "models_dir": "~/.cache/anabranch/models",
    "max_document_bytes": 50 * 1024 * 1024,
    "max_document_pages": 2_000,
    "max_document_expansion": 200 * 1024 * 1024,
    "parse_timeout": 120.0,
    "query_context_tokens": 4_000,
    "context": "full",
    "compact_tokens": 1_500,
    "model_fallback": "auto",
    "query_rewriting": False,
    "evidence": "auto",
    "evidence_passages": 8,
    "verify": "auto",
    "min_faithfulness": None,
    "query_log_days": 30,
    "erase_after": 86_400.0,
    "audit_days": 365,
    "audit_otlp": False,
    "index_verify_interval": 86_400.0,
    "backup_passphrase": None,
    "recordings_dir": None,
    "recordings_keep": 100,
    "embedding_url": None,
    "embedding_model": None,
    "embedding_api_key": None,
    "embedding_window": 8_000,
    "embedding_threads": 2,
    "embedding_topic_threshold": None,
    "embedding_relevance": None,
    "reranker_path": None,
    "reranker_url": None,
    "reranker_model": None,
    "reranker_api_key": None,
    "reranker_form": "cohere",
    "verifier_path": None,
    "verifier_url": None,
    "verifier_model": None,
    "verifier_api_key": None,
    "model_url": None,
    "model_name": None,
    "model_api_key": None,
    "database_url": None,
    "index_url": None,
    "index_api_key": None,
    "index_shards": 1,
    "index_replicas": 1,
    "index_timeout": 10.0,
    "redis_url": None,
    "redis_timeout": 0.2,
    "rate_limit": 20,
    "rate_limit_window": 300.0,
    "rate_limit_surfaces": ("rag_stream",),
    "answer_cache_ttl": 3_600.0,
    "embedding_cache_ttl": 604_800.0,
    "cache_bytes": 67_108_864,
    "max_running": 8_192,
    "max_waiting": 0,
    "caller_running": 2_048,
    "caller_waiting": 1_024,
    "computing_threads": 0,
    "caller_uploads": 16,
    "caller_upload_bytes": 134_217_728,
    "max_upload_bytes": 536_870_912,
    "caller_response_bytes": 16_777_216,
    "max_response_bytes": 268_435_456,
    "model_retries": 2,
    "retry_budget": 0.2,
    "breaker_window": 30.0,
    "breaker_calls": 10,
    "breaker_rate": 0.5,
    "breaker_pause": 10.0,
    "stream_ttl": 1_800.0,
    "stream_lease": 10.0,
    "stream_events": 20_000,
    "stream_bytes": 16_777_216,
    "stream_memory": 268_435_456,
    "caller_stream_memory": 67_108_864,
    "stream_client_bytes": 1_048_576,
    "planner_streaming": True,
    "planner_timeout": 180.0,
    "planner_retries": 2,
    "planner_steps": 10_000,
    "caller_steps": 2_500,
    "caller_stream_readers": 1_500,
    "caller_changes": 3_000,
    "caller_connections": 2_000,
    "max_connections": 0,
    "caller_pending_documents": 10_000,
    "caller_pending_bytes": 1_073_741_824,
    "caller_collections": 1_000,
    "caller_documents": 1_000_000,
    "caller_stored_bytes": 21_474_836_480,
    "planner_subagents": ("documentation", "row_selection", "action", "voice", "safety", "other"),
    "analytics_file": None,
    "analytics_otlp": False,
    "mmr_lambda": None,
    "guard_threshold": None,
    "metrics_public": False,
    "otlp_endpoint": None,
    "otlp_headers": None,
    "trace_share": 1.0,
    "log_queries": False,
    "sources": {},
    "models": {},
    "published_models": {},
    "mcp_servers": {},
    "aggregation": Aggregation(),
}

LIMITS = "configuration/test_limit_settings.py::"
CONNECTIONS = "entrypoints/http/test_connection_limits.py::"
POLICIES = "configuration/test_policy_settings.py::"
RESILIENCE = "configuration/test_resilience_settings.py::"
STREAMS = "configuration/test_stream_settings.py::"
VERIFIER = "configuration/test_verifier_settings.py::"
RECORDINGS = "entrypoints/http/test_server_recordings.py::"
TELEMETRY = "configuration/test_telemetry_settings.py::"

SWITCHES = [f"{surface}_enabled" for surface in SWITCHED_SURFACES]

# Which test shows what a setting does; one of another file as folder/file.py::test.
EFFECTS = {
    "debug": "test_debug_serves_the_docs",
    "host": "entrypoints/http/test_process.py::test_host_and_port_from_the_environment",
    "port": "entrypoints/http/test_process.py::test_host_and_port_from_the_environment",
    "log_level": "telemetry/test_logs.py::test_events_below_the_log_level_are_not_logged",
    "log_format": "telemetry/test_logs.py::test_console_log_format",
    "retrieval_timeout": "test_retrieval_timeout_costs_only_the_slow_source",
    "generation_timeout": "test_generation_timeout_is_504_generation_failed",
    "total_timeout": "test_total_timeout_is_504_deadline_exceeded",
    "default_top_k": "test_default_top_k_is_the_limit_sent",
    "max_top_k": "test_max_top_k",
    "max_data_sources": "test_max_data_sources",
    "max_context_tokens": "test_max_context_tokens_omits_the_lowest_passages",
    "max_request_bytes": "test_max_request_bytes",
    "max_reply_bytes": "test_max_reply_bytes",
    "model_streaming_enabled": "test_model_streaming_enabled_requests_a_stream_from_the_model",
    "heartbeat_interval": "test_heartbeat_while_a_model_is_silent",
    "drain_timeout": "entrypoints/http/test_process.py::test_a_stream_past_the_drain_time_ends_in_an_error_that_says_why",  # noqa: E501
    "shutdown_delay": "entrypoints/http/test_process.py::test_during_the_shutdown_delay_ready_is_503_and_questions_are_answered",  # noqa: E501
    **dict.fromkeys(SWITCHES, "entrypoints/http/test_switched_off.py::test_a_surface_that_is_switched_off_is_404"),
    "cors_origins": "test_cors_origins",
    "syfthub_url": "test_syfthub_url_is_where_paths_are_looked_up",
    "auth": "test_auth_and_origin_decide_who_may_use_a_configured_model",
    "endpoint_allowlist": "test_endpoint_allowlist_opens_private_addresses",
    "endpoint_allowlist_public": "test_endpoint_allowlist_public_opens_private_addresses_to_all_callers",
    "trusted_proxies": "test_trusted_proxies_decide_the_client_address_in_the_log",
    "syfthub_jwks_cache_ttl": "configuration/test_knowledge_settings.py::test_syfthub_jwks_cache_ttl_is_how_long_keys_are_cached",  # noqa: E501
    "jwt_audience": "configuration/test_knowledge_settings.py::test_jwt_audience_must_match_the_token",
    "data_dir": "configuration/test_knowledge_settings.py::test_data_dir_is_where_collections_are_stored",
    "default_visibility": "configuration/test_default_visibility.py::test_default_visibility_is_that_of_a_new_collection",  # noqa: E501
    "models_dir": "configuration/test_knowledge_settings.py::test_models_dir_is_where_the_embedding_model_is",
    "max_document_bytes": "configuration/test_knowledge_settings.py::test_a_document_over_a_limit_fails_alone",
    "max_document_pages": "configuration/test_knowledge_settings.py::test_a_document_over_a_limit_fails_alone",
    "max_document_expansion": "configuration/test_knowledge_settings.py::test_a_document_over_a_limit_fails_alone",
    "parse_timeout": "configuration/test_knowledge_settings.py::test_a_document_over_a_limit_fails_alone",
    "query_context_tokens": "configuration/test_knowledge_settings.py::test_query_context_tokens_omits_passages",
    "context": "configuration/test_knowledge_settings.py::test_context_compact_shows_excerpts_within_compact_tokens",
    "compact_tokens": "configuration/test_knowledge_settings.py::test_context_compact_shows_excerpts_within_compact_tokens",  # noqa: E501
    "model_fallback": "configuration/test_knowledge_settings.py::test_model_fallback_decides_where_quotes_replace_a_failed_model",  # noqa: E501
    "query_rewriting": "configuration/test_knowledge_settings.py::test_query_rewriting_asks_the_model_to_rephrase",
    "evidence": "configuration/test_evidence_settings.py::test_evidence_decides_where_passages_are_ordered_by_evidence",
    "evidence_passages": "configuration/test_evidence_settings.py::test_evidence_passages_is_how_many_are_judged",
    "verify": "configuration/test_verify_settings.py::test_verify_decides_where_sentences_are_checked",
    "min_faithfulness": "configuration/test_verify_settings.py::"
    "test_an_answer_below_the_minimum_is_withheld_and_a_streamed_one_is_flagged",
    "query_log_days": "configuration/test_knowledge_settings.py::test_query_log_days",
    "erase_after": "entrypoints/http/test_erasure.py::test_deleting_says_when_the_text_is_erased_and_then_it_is",
    "audit_days": "configuration/test_audit_settings.py::test_records_older_than_audit_days_are_deleted",
    "audit_otlp": "configuration/test_audit_settings.py::test_audit_otlp_sends_records_to_the_collector",
    "index_verify_interval": "app/test_index_scrubber.py::test_index_verify_interval_is_when_damage_is_found",
    "backup_passphrase": "entrypoints/cli/test_encrypted_backups.py::test_a_passphrase_is_read_from_a_file_or_the_environment",  # noqa: E501
    "recordings_dir": f"{RECORDINGS}test_the_runs_of_a_server_are_recorded_and_replay",
    "recordings_keep": f"{RECORDINGS}test_the_oldest_recordings_are_deleted",
    "embedding_url": "configuration/test_knowledge_settings.py::test_embedding_url_model_and_api_key_are_used",
    "embedding_model": "configuration/test_knowledge_settings.py::test_embedding_url_model_and_api_key_are_used",
    "embedding_api_key": "configuration/test_knowledge_settings.py::test_embedding_url_model_and_api_key_are_used",
    "embedding_window": "configuration/test_knowledge_settings.py::test_embedding_window_is_the_largest_chunk",
    "embedding_threads": "configuration/test_knowledge_settings.py::test_embedding_threads_are_for_the_indexer",
    "embedding_topic_threshold": "configuration/test_knowledge_settings.py::test_embedding_topic_threshold_cuts_chunks",
    "embedding_relevance": "configuration/test_knowledge_settings.py::test_embedding_relevance_is_the_score",
    "reranker_path": "configuration/test_knowledge_settings.py::test_reranker_path_decides_the_order",
    "reranker_url": "configuration/test_knowledge_settings.py::test_reranker_url_decides_the_order",
    "reranker_model": "configuration/test_knowledge_settings.py::test_reranker_url_decides_the_order",
    "reranker_api_key": "configuration/test_knowledge_settings.py::test_reranker_url_decides_the_order",
    "reranker_form": "configuration/test_knowledge_settings.py::test_reranker_url_decides_the_order",
    "verifier_path": f"{VERIFIER}test_verifier_path_checks_the_sentences_of_answers",
    "verifier_url": f"{VERIFIER}test_verifier_url_checks_the_sentences_of_answers",
    "verifier_model": f"{VERIFIER}test_verifier_url_checks_the_sentences_of_answers",
    "verifier_api_key": f"{VERIFIER}test_verifier_url_checks_the_sentences_of_answers",
    "model_url": "test_configured_model_answers_when_none_is_named",
    "model_name": "test_configured_model_answers_when_none_is_named",
    "model_api_key": "test_configured_model_answers_when_none_is_named",
    "database_url": "configuration/test_knowledge_settings.py::test_database_url_is_where_nodes_share_their_records",
    "index_url": "app/test_search_index.py::test_a_new_index_has_the_name_shards_and_replicas_of_the_settings",
    "index_api_key": "app/test_search_index.py::test_logins_over_tls",
    "index_shards": "app/test_search_index.py::test_a_new_index_has_the_name_shards_and_replicas_of_the_settings",
    "index_replicas": "app/test_search_index.py::test_a_new_index_has_the_name_shards_and_replicas_of_the_settings",
    "index_timeout": "app/test_search_index.py::test_index_timeout_bounds_the_wait_for_a_silent_server",
    "redis_url": f"{POLICIES}test_redis_url_is_where_servers_share_answers_and_limits",
    "redis_timeout": f"{POLICIES}test_redis_timeout_bounds_the_wait_for_a_silent_redis",
    "rate_limit": f"{POLICIES}test_rate_limit_limits_each_caller",
    "rate_limit_window": f"{POLICIES}test_rate_limit_window_is_how_long_requests_count",
    "rate_limit_surfaces": f"{POLICIES}test_rate_limit_surfaces_are_the_surfaces_with_a_limit",
    "answer_cache_ttl": f"{POLICIES}test_answer_cache_ttl",
    "embedding_cache_ttl": f"{POLICIES}test_embedding_cache_ttl",
    "cache_bytes": f"{POLICIES}test_cache_bytes_limits_the_memory_cache",
    "max_running": f"{POLICIES}test_max_running_and_max_waiting",
    "max_waiting": f"{POLICIES}test_max_running_and_max_waiting",
    "caller_running": f"{POLICIES}test_caller_running_and_caller_waiting",
    "caller_waiting": f"{POLICIES}test_caller_running_and_caller_waiting",
    "computing_threads": "configuration/test_evidence_settings.py::test_computing_threads_compute_for_a_caller",
    "caller_uploads": f"{LIMITS}test_caller_uploads_is_how_many_arrive_at_once",
    "caller_upload_bytes": f"{LIMITS}test_caller_upload_bytes_and_max_upload_bytes_limit_what_is_held",
    "max_upload_bytes": f"{LIMITS}test_caller_upload_bytes_and_max_upload_bytes_limit_what_is_held",
    "caller_response_bytes": f"{LIMITS}test_caller_response_bytes_and_max_response_bytes_limit_large_replies",
    "max_response_bytes": f"{LIMITS}test_caller_response_bytes_and_max_response_bytes_limit_large_replies",
    "mmr_lambda": f"{POLICIES}test_mmr_lambda_is_for_every_surface",
    "guard_threshold": f"{POLICIES}test_guard_threshold_is_for_every_surface",
    "model_retries": f"{RESILIENCE}test_model_retries_is_how_often_a_model_is_retried",
    "retry_budget": f"{RESILIENCE}test_retry_budget_is_the_share_of_requests_that_are_retried",
    "breaker_window": f"{RESILIENCE}test_breaker_window_is_how_long_failures_count",
    "breaker_calls": f"{RESILIENCE}test_breaker_calls_is_the_minimum_before_the_breaker_opens",
    "breaker_rate": f"{RESILIENCE}test_breaker_rate_is_the_share_of_failures",
    "breaker_pause": f"{RESILIENCE}test_breaker_pause_is_how_long_the_breaker_stays_open",
    "workers": f"{STREAMS}test_several_workers_without_redis_have_no_resumable_streams",
    "stream_ttl": f"{STREAMS}test_stream_ttl_is_how_long_a_stream_can_be_read_after_its_end",
    "stream_lease": f"{STREAMS}test_stream_lease_is_when_a_silent_worker_counts_as_lost",
    "stream_events": f"{STREAMS}test_stream_events_is_how_many_a_stream_holds",
    "stream_bytes": f"{STREAMS}test_stream_bytes_is_how_large_a_stream_may_be",
    "stream_memory": f"{STREAMS}test_stream_memory_limits_all_streams_together",
    "caller_stream_memory": f"{LIMITS}test_caller_stream_memory_limits_the_streams_of_one_caller",
    "stream_client_bytes": f"{STREAMS}test_stream_client_bytes_is_how_far_a_reader_may_fall_behind",
    "planner_streaming": f"{STREAMS}test_planner_streaming_off_answers_once_at_the_end",
    "planner_timeout": f"{STREAMS}test_planner_timeout_is_for_subagents_without_a_deadline",
    "planner_retries": f"{STREAMS}test_planner_retries_is_how_often_a_subagent_is_retried",
    "planner_steps": f"{STREAMS}test_planner_steps_is_how_many_run_at_once",
    "caller_stream_readers": f"{LIMITS}test_caller_stream_readers_is_how_many_streams_one_caller_reads",
    "caller_changes": f"{LIMITS}test_caller_changes_limits_what_one_key_changes_within_the_window",
    "caller_connections": f"{CONNECTIONS}test_a_client_with_too_many_connections_is_refused_with_429",
    "max_connections": f"{CONNECTIONS}test_where_every_connection_has_a_request_a_new_one_is_refused_with_503",
    "caller_steps": f"{LIMITS}test_caller_steps_is_how_many_one_caller_runs_at_once",
    "caller_pending_documents": f"{LIMITS}test_caller_pending_documents_and_caller_pending_bytes_limit_what_waits",
    "caller_pending_bytes": f"{LIMITS}test_caller_pending_documents_and_caller_pending_bytes_limit_what_waits",
    "caller_collections": f"{LIMITS}test_caller_collections_limits_what_one_caller_owns",
    "caller_documents": f"{LIMITS}test_caller_documents_and_caller_stored_bytes_limit_what_is_stored",
    "caller_stored_bytes": f"{LIMITS}test_caller_documents_and_caller_stored_bytes_limit_what_is_stored",
    "planner_subagents": f"{STREAMS}test_planner_subagents_are_the_enabled_ones",
    "analytics_file": f"{STREAMS}test_analytics_file_gets_a_line_for_each_event",
    "analytics_otlp": f"{STREAMS}test_analytics_otlp_sends_events_to_the_collector",
    "metrics_public": f"{TELEMETRY}test_metrics_public_allows_reading_metrics_without_a_key",
    "otlp_endpoint": f"{TELEMETRY}test_otlp_endpoint_is_where_traces_go",
    "otlp_headers": f"{TELEMETRY}test_otlp_headers_are_sent_to_the_collector",
    "trace_share": f"{TELEMETRY}test_trace_share_is_how_many_questions_are_traced",
    "log_queries": f"{TELEMETRY}test_log_queries_logs_the_beginning_of_a_question",
    "sources": "test_sources_and_models_of_the_file_are_asked_by_name",
    "models": "test_sources_and_models_of_the_file_are_asked_by_name",
    "published_models": "configuration/test_knowledge_settings.py::test_publish_makes_a_model_available_as_owner_slug",
    "mcp_servers": "sources/mcp/test_real_servers.py::test_real_servers_are_searched_in_both_protocols",
    "aggregation": "app/test_aggregator.py::test_aggregate_uses_the_first_matching_routing_rule",
}

# What spec 1 lists.
DOCUMENTED = [
    "DEBUG",
    "HOST",
    "PORT",
    "LOG_LEVEL",
    "LOG_FORMAT",
    "RETRIEVAL_TIMEOUT",
    "GENERATION_TIMEOUT",
    "TOTAL_TIMEOUT",
    "DEFAULT_TOP_K",
    "MAX_TOP_K",
    "MAX_DATA_SOURCES",
    "MODEL_STREAMING_ENABLED",
    "CORS_ORIGINS",
    "SYFTHUB_URL",
]

NO_SECONDS = ["garbage", "-1", "0", "nan", "inf", "-inf", "1e400", "999999999", "[1]", "null"]
NO_COUNT = ["garbage", "-1", "0", "nan", "inf", "1e400", "1.5", "9999999999", "0x10", "[1]", "null"]
NO_FLAG = ["garbage", "-1", "2", "nan", "inf", "[true]", "null"]
NO_URL = ["garbage", "-1", "nan", "ftp://host", "http://", "//host", "http://host:99999", "http://[::1"]
NO_BLOCKS = ["garbage", "-1", "nan", "300.1.1.1", "10.0.0.0/99", "10.0.0.0/-1", "[1]", "[", '["10.0.0.0/8"']
ANY_TEXT = {
    "host",
    "data_dir",
    "models_dir",
    "recordings_dir",
    "jwt_audience",
    "model_name",
    "model_api_key",
    "index_api_key",
    "embedding_model",
    "embedding_api_key",
    "reranker_path",
    "reranker_model",
    "reranker_api_key",
    "verifier_path",
    "verifier_model",
    "verifier_api_key",
    "backup_passphrase",
    "otlp_headers",
    "analytics_file",
}
NO_SHARE = ["garbage", "-0.1", "1.1", "nan", "inf", "[1]", "null"]
NO_REMEMBERING = ["garbage", "-1", "nan", "inf", "1e400", "99999999", "[1]", "null"]
NO_BYTES = ["garbage", "-1", "0", "nan", "inf", "1e400", "1.5", "9999999999999999", "0x10", "[1]", "null"]
NO_NUMBER = ["garbage", "-1", "nan", "inf", "1e400", "1.5", "9999999999", "0x10", "[1]", "null"]
WRONG = {
    "debug": NO_FLAG,
    "port": ["garbage", "-1", "65536", "nan", "inf", "1.5", "99999999999999999999", "[1]"],
    "log_level": ["garbage", "-1", "0", "nan", "TRACE", '["INFO"]'],
    "log_format": ["garbage", "-1", "0", "nan", "xml"],
    "retrieval_timeout": NO_SECONDS,
    "generation_timeout": NO_SECONDS,
    "total_timeout": NO_SECONDS,
    "default_top_k": NO_COUNT,
    "max_top_k": NO_COUNT,
    "max_data_sources": NO_COUNT,
    "max_context_tokens": NO_COUNT,
    "max_request_bytes": NO_COUNT,
    "max_reply_bytes": NO_COUNT,
    "model_streaming_enabled": NO_FLAG,
    "heartbeat_interval": NO_SECONDS,
    "drain_timeout": NO_SECONDS,
    "shutdown_delay": ["garbage", "-1", "nan", "inf", "1e400", "3601", "[1]", "null"],
    **dict.fromkeys(SWITCHES, NO_FLAG),
    "cors_origins": ["[", "[1]", '["https://a"', "garbage", "https://a.example/path", "javascript:alert(1)"],
    "syfthub_url": NO_URL,
    "auth": ["garbage", "-1", "0", "nan"],
    "endpoint_allowlist": [*NO_BLOCKS, "http://", "ftp://host"],
    "endpoint_allowlist_public": NO_FLAG,
    "trusted_proxies": [*NO_BLOCKS, "http://10.0.0.1"],
    "model_url": NO_URL,
    "syfthub_jwks_cache_ttl": NO_SECONDS,
    "default_visibility": ["garbage", "restricted", "Public", "1"],
    "max_document_bytes": NO_COUNT,
    "max_document_pages": NO_COUNT,
    "max_document_expansion": NO_COUNT,
    "parse_timeout": NO_SECONDS,
    "query_context_tokens": [*NO_COUNT, "1999"],
    "context": ["garbage", "-1", "0", "nan", "Full"],
    "compact_tokens": [*NO_COUNT, "499"],
    "model_fallback": ["garbage", "-1", "0", "true", "On"],
    "query_rewriting": NO_FLAG,
    "evidence": ["garbage", "-1", "0", "nan", "ON", "[auto]", "null"],
    "evidence_passages": [*NO_COUNT, "26"],
    "verify": ["garbage", "-1", "0", "nan", "ON", "[auto]", "null"],
    "min_faithfulness": NO_SHARE,
    "recordings_keep": NO_COUNT,
    "erase_after": ["garbage", "-1", "nan", "inf", "1e400", "2592001", "[1]", "null"],
    "query_log_days": ["garbage", "-1", "nan", "inf", "1e400", "1.5", "36501", "[1]", "null"],
    "audit_days": ["garbage", "-1", "0", "nan", "inf", "1e400", "1.5", "36501", "[1]", "null"],
    "audit_otlp": NO_FLAG,
    "index_verify_interval": NO_SECONDS,
    "embedding_url": NO_URL,
    "embedding_window": NO_COUNT,
    "embedding_threads": NO_COUNT,
    "embedding_topic_threshold": NO_SHARE,
    "embedding_relevance": [
        "garbage",
        "1",
        "1,2",
        "1,2,3,4",
        "1,2,x",
        "1,2,nan",
        "1,2,inf",
        "1,2,1001",
        "[1,2]",
        "null",
    ],
    "reranker_url": NO_URL,
    "verifier_url": NO_URL,
    "reranker_form": ["garbage", "-1", "0", "nan", "Cohere"],
    "database_url": ["garbage", "-1", "nan", "mysql://host/name", "postgresql://", "//host"],
    "index_url": ["garbage", "-1", "nan", "ftp://host/name", "http://", "//host", "http://host/Name", "http://a,/b"],
    "index_shards": NO_COUNT,
    "index_replicas": NO_NUMBER,
    "index_timeout": NO_SECONDS,
    "redis_url": ["garbage", "-1", "nan", "http://host", "redis://", "//host"],
    "redis_timeout": NO_SECONDS,
    "rate_limit": NO_NUMBER,
    "rate_limit_window": NO_SECONDS,
    "rate_limit_surfaces": ["garbage", "[", '["rag"]', "[1]"],
    "answer_cache_ttl": NO_REMEMBERING,
    "embedding_cache_ttl": NO_REMEMBERING,
    "cache_bytes": NO_COUNT,
    "max_running": NO_COUNT,
    "max_waiting": NO_NUMBER,
    "caller_running": NO_COUNT,
    "caller_waiting": NO_NUMBER,
    "computing_threads": NO_NUMBER,
    "caller_uploads": NO_COUNT,
    "caller_upload_bytes": NO_BYTES,
    "max_upload_bytes": NO_BYTES,
    "caller_response_bytes": NO_BYTES,
    "max_response_bytes": NO_BYTES,
    "model_retries": [*NO_NUMBER, "11"],
    "retry_budget": NO_SHARE,
    "breaker_window": NO_SECONDS,
    "breaker_calls": NO_COUNT,
    "breaker_rate": NO_SHARE,
    "breaker_pause": NO_SECONDS,
    "mmr_lambda": NO_SHARE,
    "guard_threshold": NO_SHARE,
    "workers": [*NO_COUNT, "1001"],
    "stream_ttl": NO_SECONDS,
    "stream_lease": NO_SECONDS,
    "stream_events": NO_COUNT,
    "stream_bytes": NO_COUNT,
    "stream_memory": NO_COUNT,
    "caller_stream_memory": NO_BYTES,
    "stream_client_bytes": NO_COUNT,
    "planner_streaming": NO_FLAG,
    "planner_timeout": NO_SECONDS,
    "planner_retries": [*NO_NUMBER, "11"],
    "planner_steps": NO_COUNT,
    "caller_steps": NO_COUNT,
    "caller_stream_readers": NO_COUNT,
    **dict.fromkeys(("caller_changes", "caller_connections", "max_connections"), NO_NUMBER),
    "caller_pending_documents": NO_COUNT,
    "caller_pending_bytes": NO_BYTES,
    "caller_collections": NO_COUNT,
    "caller_documents": NO_COUNT,
    "caller_stored_bytes": NO_BYTES,
    "planner_subagents": ["garbage", "[", '["docs"]', "[1]"],
    "analytics_otlp": NO_FLAG,
    "metrics_public": NO_FLAG,
    "otlp_endpoint": NO_URL,
    "trace_share": NO_SHARE,
    "log_queries": NO_FLAG,
}

Config = Callable[[str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    def write(text: str) -> Path:
        path = tmp_path / "conf.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What has been logged so far."""
    written: list[str] = []

    def read() -> str:
        written.append(capsys.readouterr().err)
        return "".join(written)

    yield read
    logging.root.handlers.clear()


def body(space: Space, *slugs: str, model: str = "scribe", **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "model": ref(space, model), "data_sources": [ref(space, slug) for slug in slugs], **more}


def says_what_it_takes(error: ConfigurationError, where: str) -> bool:
    """One sentence, which begins with where the value stands."""
    text = str(error)
    return text.startswith(f"{where} takes ") and text.endswith(".") and "\n" not in text


# --- the table


def test_every_setting_has_a_test_that_shows_what_it_does() -> None:
    assert set(EFFECTS) == set(Settings.__struct_fields__)
    for test in EFFECTS.values():
        place, _, name = test.rpartition("::")
        source = (TESTS / place if place else Path(__file__)).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), test


def test_every_variable_has_wrong_values_to_refuse() -> None:
    assert set(WRONG) | ANY_TEXT == set(VARIABLES.values())


def test_settings_have_the_documented_defaults() -> None:
    settings = load({})
    assert {name: getattr(settings, name) for name in Settings.__struct_fields__} == DEFAULTS


@pytest.mark.parametrize("variable", VARIABLES)
def test_an_empty_variable_is_the_default(variable: str) -> None:
    assert load({variable: ""}) == load({})


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_blank_variable_is_the_default_or_refused(variable: str) -> None:
    try:
        settings = load({variable: "  "})
    except ConfigurationError:
        settings = load({})
    assert settings == load({})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_variable_is_known(name: str) -> None:
    assert unknown({PREFIX + name: "1"}) == {}


@pytest.mark.parametrize("variable", [*VARIABLES, PREFIX + "CONFIG"])
def test_the_documentation_has_every_variable_and_its_default(variable: str) -> None:
    table = (TESTS.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `{variable}` \| (.+?) \| .+ \|$", table, re.MULTILINE)
    assert len(rows) == 1
    if variable not in (PREFIX + "CONFIG", PREFIX + "MODEL_NAME"):  # these have one in words
        assert rows[0].strip("`") == _shown(DEFAULTS[VARIABLES[variable]])


def _shown(default: object) -> str:
    match default:
        case None | ():
            return "none"
        case bool():
            return str(default).lower()
        case tuple():
            return json.dumps(default)
        case float():
            return f"{default:g}"
        case _:
            return str(default)


# --- wrong values


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_one_sentence(name: str) -> None:
    variable = next(variable for variable, setting in VARIABLES.items() if setting == name)
    for value in WRONG[name]:
        said = refusal({variable: value})
        assert said is not None, f"{value!r} is taken"
        assert says_what_it_takes(said, variable), (value, said)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_in_the_file_is_one_sentence(config: Config, name: str) -> None:
    for value in WRONG[name]:
        if value == "null":
            continue
        said = refusal({}, config(json.dumps({"settings": {name: value}})))
        assert said is not None, f"{value!r} is taken"
        text = str(said)
        assert name in text.lower(), (value, text)
        assert " takes " in text, (value, text)
        assert "\n" not in text, (value, text)


def refusal(environment: dict[str, str], path: Path | None = None) -> ConfigurationError | None:
    try:
        load(environment, path)
    except ConfigurationError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("variable", "value", "largest"),
    [
        ("AGGREGATOR_TOTAL_TIMEOUT", "999999999", "86400"),
        ("AGGREGATOR_MAX_DATA_SOURCES", "9999999999", "1000000000"),
        ("AGGREGATOR_PORT", "65536", "65535"),
    ],
)
def test_a_setting_over_its_maximum_names_the_maximum(variable: str, value: str, largest: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({variable: value})
    assert largest in re.sub(r"[,_]", "", str(caught.value))


def test_default_top_k_cannot_be_over_the_maximum() -> None:
    with pytest.raises(ConfigurationError, match=r"^AGGREGATOR_DEFAULT_TOP_K takes at most 3 \(MAX_TOP_K\), not 5\.$"):
        loaded(MAX_TOP_K="3")


@pytest.mark.parametrize(("name", "needed"), NEEDS.items())
def test_a_setting_that_needs_another_says_so(name: str, needed: str) -> None:
    values = {"embedding_url": "http://host", "analytics_otlp": "true", "audit_otlp": "true"}
    with pytest.raises(ConfigurationError) as caught:
        loaded(**{name.upper(): values.get(name, "some-text")})
    assert str(caught.value) == f"{PREFIX}{name.upper()} needs {PREFIX}{needed.upper()}, which is not set."


@pytest.mark.parametrize("name", ["RERANKER", "VERIFIER"])
def test_the_path_and_the_url_of_a_model_exclude_each_other(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^AGGREGATOR_{name}_PATH and AGGREGATOR_{name}_URL are both set"):
        loaded(**{f"{name}_PATH": "/models/reranker", f"{name}_URL": "http://host"})


@pytest.mark.parametrize("name", ["DATA_DIR", "MODELS_DIR", "RECORDINGS_DIR"])
def test_a_folder_cannot_be_a_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert getattr(loaded(**{name: str(tmp_path / "not yet there")}), name.lower()) == str(tmp_path / "not yet there")
    for wrong in (file, file / "below"):
        with pytest.raises(ConfigurationError, match=rf"^AGGREGATOR_{name} takes a folder, and .*/file' is a file\.$"):
            loaded(**{name: str(wrong)})


@pytest.mark.parametrize("given", ["chat,rag", '["chat", "rag"]'])
def test_a_wrong_entry_of_a_list_is_named(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^AGGREGATOR_RATE_LIMIT_SURFACES takes a list of .*, not 'rag'\.$"):
        loaded(RATE_LIMIT_SURFACES=given)


def test_an_unknown_variable_is_named() -> None:
    given = {"AGGREGATOR_PROT": "1", "AGGREGATOR_PORT": "1", "AGGREGATOR_CONFIG": "x", "AGGREGATOR_X": "1", "PATH": "/"}
    assert unknown(given) == {"AGGREGATOR_PROT": "did you mean AGGREGATOR_PORT?", "AGGREGATOR_X": ""}


# --- the file


def test_the_file_is_read_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "anabranch.yaml").write_text("settings: {port: 4711}", encoding="utf-8")
    assert load({}).port == 4711


def test_config_names_the_file_and_the_environment_wins(config: Config) -> None:
    path = config("settings: {port: 4711, max_top_k: 9, cors_origins: [https://a.example]}")
    settings = loaded(CONFIG=str(path), PORT="4712")
    assert (settings.port, settings.max_top_k, settings.cors_origins) == (4712, 9, ("https://a.example",))


def test_an_argument_wins_over_config(config: Config, tmp_path: Path) -> None:
    path = config("settings: {port: 4711}")
    assert load({"AGGREGATOR_CONFIG": str(tmp_path / "missing.yaml")}, path).port == 4711


def test_variables_in_settings_of_the_file_are_taken_from_the_environment(config: Config) -> None:
    file = config(
        "settings: {model_url: 'http://${HOST}:${PORT:-80}', model_api_key: '${MKEY}', data_dir: '$${x}', "
        "endpoint_allowlist: ['http://${HOST}'], port: 8002}"
    )
    settings = load({"MKEY": "s3cret", "HOST": "model.example"}, file)
    assert (settings.model_url, settings.model_api_key) == ("http://model.example:80", "s3cret")
    assert (settings.data_dir, settings.endpoint_allowlist) == ("${x}", ("http://model.example",))


@pytest.mark.parametrize("environment", [{}, {"MKEY": ""}])
def test_a_variable_in_a_setting_that_is_not_set_stops_the_start(config: Config, environment: dict[str, str]) -> None:
    file = config("settings: {model_url: 'http://model.example', model_api_key: '${MKEY}'}")
    with pytest.raises(ConfigurationError) as caught:
        load(environment, file)
    said = "settings.model_api_key is taken from MKEY, which is not set. Set it, or write ${MKEY:-default}."
    assert str(caught.value) == f"{file}: {said}"


def test_the_value_of_a_variable_in_a_setting_is_not_in_errors(config: Config) -> None:
    with pytest.raises(ConfigurationError, match=r"settings\.port takes a ") as caught:
        load({"MKEY": "s3cret"}, config("settings: {port: '${MKEY}'}"))
    assert "s3cret" not in str(caught.value)


def test_an_empty_variable_can_close_the_allowlist_of_the_file(config: Config) -> None:
    path = config("settings: {endpoint_allowlist: [10.0.0.0/8]}")
    assert loaded(CONFIG=str(path)).endpoint_allowlist == ("10.0.0.0/8",)
    assert loaded(CONFIG=str(path), ENDPOINT_ALLOWLIST="").endpoint_allowlist == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("settings: {prot: 1}", "settings has no 'prot' (did you mean port?)."),
        ("settings: {AGGREGATOR_PORT: 1}", "settings has no 'AGGREGATOR_PORT' (did you mean port?)."),
        ("port: 1", "there is no block 'port'; there are: settings, "),
        ("port: 1", "Settings such as port belong under settings."),
        ("settings:\n\tport: 1", "this is not YAML (line 2: a tab; indent with spaces)."),
        ("setings: {port: 1}", "'setings'"),
        ("sources: {a: {url: 'http://h', slug: s, tokn: x}}", "sources.a has no field 'tokn' (did you mean token?)."),
        ("models: {a: {url: 'http://h'}}", "models.a needs the field 'slug'."),
        ("models: {a: {url: 'http://h', slug: }}", "models.a needs the field 'slug'."),
        ("models: {a: {url: 'http://h', slug: 5}}", "models.a.slug takes a text, not a number; put it in quotes."),
        ("models: {a: http://h}", "models.a takes fields (name: value), not a text."),
        ("models: {a: {url: 'http://h', slug: s, kind: soap}}", "'soap'"),
        ("sources: {a: {url: 'http://h', slug: s, token: '${NOT_SET}'}}", "NOT_SET"),
        ("sources: {a: {url: 'no url', slug: s}}", "url"),
        ("sources: {a: {url: 'http://h', slug: s, publish: mia/a}}", "sources.a.publish"),
        ("models: {a: {url: 'http://h', slug: s, publish: mia}}", "models.a.publish takes owner/slug"),
        ("models: {a: {url: 'http://h', slug: s, publish: Mia/A}}", "models.a.publish takes owner/slug"),
        (
            "models: {a: {url: 'http://h', slug: s, publish: mia/a}, b: {url: 'http://h', slug: s, publish: mia/a}}",
            "models.b.publish",
        ),
        ("- 1", "takes blocks"),
        ("settings: [", "YAML"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_the_field(config: Config, text: str, said: str) -> None:
    path = config(text)
    with pytest.raises(ConfigurationError) as caught:
        load({}, path)
    assert said in str(caught.value)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="the file cannot be read") as caught:
        loaded(CONFIG=str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


async def test_sources_and_models_of_the_file_are_asked_by_name(space: Space, config: Config) -> None:
    space.source("guarded", documents=[Document(title="Doc", content="A guarded word.")], token="sat-1")
    path = config(
        f"sources: {{shelf: {{url: '{space.url}', slug: guarded, owner: alice, tenant: acme, token: '${{SHELF}}'}}}}\n"
        f"models: {{writer: {{url: '{space.url}', slug: scribe, kind: openai}}}}"
    )
    settings = load({"AGGREGATOR_CONFIG": str(path), "SHELF": "sat-1"})
    async with Anabranch.open(settings=settings) as anabranch:
        assert (await anabranch.ask(PROMPT)).text == "A guarded word [alice/guarded]."
        assert (await anabranch.ask(PROMPT, sources=["shelf"], model="writer")).replies[0].status is Status.SUCCESS
    asked, written = space.requests[:2]
    assert (asked.headers["Authorization"], asked.headers["X-Tenant-Name"]) == ("Bearer sat-1", "acme")
    assert written.path == "/v1/chat/completions"


# --- secrets


def test_secret_settings_are_not_in_the_repr(config: Config) -> None:
    path = config("models: {m: {url: 'http://h', slug: s, token: sat-hush-hush}}")
    settings = loaded(CONFIG=str(path), MODEL_API_KEY="sk-hush-hush", MODEL_URL="http://h")
    shown = repr(settings) + str(settings) + repr(settings.models) + repr(settings.default_model) + f"{settings}"
    assert "hush-hush" not in shown
    assert "hush-hush" not in repr(Endpoint(slug="s", url="http://h", token="sat-hush-hush"))


@pytest.mark.parametrize(
    "text",
    [
        "settings: {model_api_key: [sk-hush-hush]}",
        "settings: {embedding_api_key: [sk-hush-hush]}",
        "settings: {reranker_api_key: [sk-hush-hush]}",
        "settings: {model_url: 'http://user:hush-hush@host'}",
        "settings: {endpoint_allowlist: ['http://user:hush-hush@host']}",
        "models: {m: {url: 'http://h', slug: s, token: [sk-hush-hush]}}",
        "settings: {model_api_key: sk-hush-hush",
    ],
)
def test_secret_settings_are_not_in_errors(config: Config, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({}, config(text))
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["MODEL_URL", "SYFTHUB_URL", "EMBEDDING_URL", "RERANKER_URL", "ENDPOINT_ALLOWLIST"])
def test_a_password_in_a_url_is_not_in_the_error(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{PREFIX}{name} ") as caught:
        loaded(**{name: "http://user:hush-hush@host"})
    assert "hush-hush" not in str(caught.value)


# --- what each of them does


@pytest.mark.parametrize(("debug", "status"), [("false", 404), ("true", 200), ("1", 200), ("0", 404)])
async def test_debug_serves_the_docs(debug: str, status: int) -> None:
    async with served(DEBUG=debug) as server, server.session.get(f"{server.url}/docs") as response:
        assert response.status == status


async def test_retrieval_timeout_costs_only_the_slow_source(space: Space) -> None:
    async with served(RETRIEVAL_TIMEOUT="0.1") as server:
        answer = await server.chat(**body(space, "hang", "docs"))
    assert [info["status"] for info in answer["retrieval_info"]] == ["timeout", "success"]
    assert "0.1 seconds" in answer["retrieval_info"][0]["error_message"]
    assert "[docs]" in answer["response"]


async def test_generation_timeout_is_504_generation_failed(space: Space) -> None:
    async with served(GENERATION_TIMEOUT="0.1") as server:
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", model="hang"))
        assert (status, error["error"], error["details"]["model_path"]) == (504, "generation_failed", "hang")
        events = await server.stream(**body(space, "docs", model="hang"))
    assert (events[-1].name, events[-1].data["error"]) == ("error", "generation_failed")


async def test_total_timeout_is_504_deadline_exceeded(space: Space) -> None:
    async with served(TOTAL_TIMEOUT="0.3") as server:
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", model="hang"))
        assert (status, error["error"]) == (504, "deadline_exceeded")
        events = await server.stream(**body(space, "docs", model="hang"))
    assert (events[-1].name, events[-1].data["error"]) == ("error", "deadline_exceeded")


async def test_default_top_k_is_the_limit_sent(space: Space) -> None:
    async with served(DEFAULT_TOP_K="2") as server:
        answer = await server.chat(**body(space, "docs"))
    assert space.requests[0].body["limit"] == 2
    assert len(answer["sources"]) == 2


async def test_max_top_k(space: Space) -> None:
    async with served(MAX_TOP_K="7") as server:
        await server.chat(**body(space, "docs", top_k=7))
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", top_k=8))
    assert (status, error["error"]) == (422, "invalid_request")
    assert "7" in error["message"]


async def test_max_data_sources(space: Space) -> None:
    async with served(MAX_DATA_SOURCES="2") as server:
        await server.chat(**body(space, "docs", "docs"))
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", "docs", "docs"))
    assert (status, error["error"]) == (422, "invalid_request")
    assert "at most 2" in error["message"]


async def test_max_context_tokens_omits_the_lowest_passages(space: Space) -> None:
    shelf = [
        Document(title=f"T{score}", content=f"{score}" + " river" * 60, score=score / 10) for score in (6, 9, 7, 8)
    ]
    space.source("shelf", documents=shelf)
    async with served(MAX_CONTEXT_TOKENS="300") as server:
        answer = await server.chat(**body(space, "shelf"))
    prompt = space.requests[-1].body["messages"][-1]["content"]
    kept = re.findall(r"<title>(\w+)</title>", prompt)
    assert kept == ["T9", "T8"]
    assert answer["metadata"]["documents_omitted"] == 2
    assert len(answer["sources"]) == 4


async def test_max_request_bytes(space: Space) -> None:
    async with served(MAX_REQUEST_BYTES="1000") as server:
        await server.chat(**body(space, "docs"))
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", custom_system_prompt="x" * 1000))
    assert (status, error["error"]) == (413, "request_too_large")
    assert "1,000 bytes" in error["message"]


async def test_max_reply_bytes(space: Space) -> None:
    space.source("long", documents=[Document(title="Long", content="x" * 5000)])
    space.model("chatterbox", reply="y" * 5000)
    async with served(MAX_REPLY_BYTES="4000") as server:
        answer = await server.chat(**body(space, "long", "docs"))
        status, error, _ = await server.post("/api/v1/chat", body(space, "docs", model="chatterbox"))
    assert [info["status"] for info in answer["retrieval_info"]] == ["error", "success"]
    assert "4,000 bytes" in answer["retrieval_info"][0]["error_message"]
    assert (status, error["error"]) == (502, "generation_failed")
    assert "4,000 bytes" in error["message"]


@pytest.mark.parametrize(("value", "sent"), [("true", True), ("false", False), ("", False)])
async def test_model_streaming_enabled_requests_a_stream_from_the_model(space: Space, value: str, sent: bool) -> None:
    async with served(MODEL_STREAMING_ENABLED=value) as server:
        await server.chat(**body(space, "docs"))
        await server.stream(**body(space, "docs"))
    assert [request.body["stream"] for request in space.requests if request.slug == "scribe"] == [sent, sent]


async def test_heartbeat_while_a_model_is_silent(space: Space) -> None:
    space.model("slow", reply="At last.", delay_s=0.4)
    async with (
        served(HEARTBEAT_INTERVAL="0.05") as server,
        server.session.post(f"{server.url}/api/v1/chat/stream", json=body(space, "docs", model="slow")) as response,
    ):
        text = await response.text()
    assert "\n\n: keep-alive\n\n" in text
    assert parse_sse(text)[-1].name == "done"


async def test_no_heartbeat_while_nothing_is_slow(space: Space) -> None:
    async with (
        served() as server,
        server.session.post(f"{server.url}/api/v1/chat/stream", json=body(space, "docs")) as response,
    ):
        assert "keep-alive" not in await response.text()


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ("", "https://anyone.example", "*"),
        ('["*"]', "https://anyone.example", "*"),
        ('["https://app.example"]', "https://app.example", "https://app.example"),
        ("https://app.example, https://b.example", "https://b.example", "https://b.example"),
        ('["https://app.example"]', "https://evil.example", None),
        ('["https://app.example"]', "https://app.example.evil.example", None),
        ("[]", "https://app.example", None),
    ],
)
async def test_cors_origins(space: Space, origins: str, origin: str, allowed: str | None) -> None:
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-correlation-id",
    }
    async with served(CORS_ORIGINS=origins, ENDPOINT_ALLOWLIST_PUBLIC="true") as server:
        async with server.session.options(f"{server.url}/api/v1/chat", headers=asks) as preflight:
            assert preflight.headers.get("Access-Control-Allow-Origin") == allowed
            assert preflight.status == (400 if allowed is None else 200)
        status, _, headers = await server.post("/api/v1/chat", body(space, "docs"), headers={"Origin": origin})
    assert status == 200
    assert headers.get("Access-Control-Allow-Origin") == allowed


async def test_syfthub_url_is_where_paths_are_looked_up(space: Space) -> None:
    async with Hub() as hub:
        hub.publish(owner="alice", slug="docs", url=space.url, type="data_source", tenant="acme")
        hub.publish(owner="mia", slug="scribe", url=space.url, type="model")
        async with opened(SYFTHUB_URL=hub.url) as anabranch:
            answer = await anabranch.ask(PROMPT, sources=["alice/docs"], model="mia/scribe")
    assert "[alice/docs]" in answer.text
    assert space.requests[0].headers["X-Tenant-Name"] == "acme"


@pytest.mark.parametrize(
    ("allowlist", "open_"), [("", False), ("10.0.0.0/8", False), (LOCAL, True), ("URL", True), ("::1, URL", True)]
)
async def test_endpoint_allowlist_opens_private_addresses(space: Space, allowlist: str, open_: bool) -> None:
    async with served(ENDPOINT_ALLOWLIST=allowlist.replace("URL", space.url)) as server:
        answer = await server.chat(**body(space, "docs", model="", retrieval_only=True))
    info = answer["retrieval_info"][0]
    assert info["status"] == ("success" if open_ else "error")
    assert len(space.requests) == open_
    assert open_ or "operator has not allowed it" in info["error_message"]


@pytest.mark.parametrize(("public", "open_"), [("true", True), ("false", False), ("", False)])
@pytest.mark.parametrize("headers", [{"Origin": "https://anyone.example"}, {"X-Forwarded-For": "203.0.113.9"}])
async def test_endpoint_allowlist_public_opens_private_addresses_to_all_callers(
    space: Space, public: str, open_: bool, headers: dict[str, str]
) -> None:
    request = body(space, "docs", model="", retrieval_only=True)
    async with served(ENDPOINT_ALLOWLIST_PUBLIC=public) as server:
        _, answer, replied = await server.post("/api/v1/chat", request, headers=headers)
    assert answer["retrieval_info"][0]["status"] == ("success" if open_ else "error")
    assert len(space.requests) == open_
    assert "Origin" not in headers or replied["Access-Control-Allow-Origin"] == "*"


async def test_configured_endpoints_need_no_allowlist(space: Space, config: Config) -> None:
    path = config(f"sources: {{shelf: {{url: '{space.url}', slug: docs}}}}")
    async with opened(CONFIG=str(path), ENDPOINT_ALLOWLIST="", MODEL_URL=space.url, MODEL_NAME="scribe") as anabranch:
        assert (await anabranch.ask(PROMPT)).replies[0].status is Status.SUCCESS


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/chat/completions"])
async def test_configured_model_answers_when_none_is_named(space: Space, suffix: str) -> None:
    space.model("gpt", reply="From the configured model.", token="sk-1")
    model = {"MODEL_URL": space.url + suffix, "MODEL_NAME": "gpt", "MODEL_API_KEY": "sk-1"}
    async with opened(**model) as anabranch:
        answer = await anabranch.ask(PROMPT, sources=[f"{space.url}/docs"])
    assert (answer.text, answer.model) == ("From the configured model.", "gpt")
    assert space.requests[-1].headers["Authorization"] == "Bearer sk-1"
    assert "Authorization" not in space.requests[0].headers


# --- who may use what the operator configured


REMOTE = "203.0.113.9"
PROXY = "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "headers", "may"),
    [
        pytest.param({}, {}, True, id="somebody at this machine"),
        pytest.param({}, {"Origin": "SELF"}, True, id="a page that this server serves"),
        pytest.param({}, {"Host": "localhost:8001"}, True, id="under another local name"),
        pytest.param({}, {"X-Forwarded-For": "127.0.0.1"}, False, id="behind a proxy nobody trusts"),
        pytest.param({}, {"Forwarded": "for=127.0.0.1"}, False, id="behind another proxy nobody trusts"),
        pytest.param({}, {"X-Real-IP": "127.0.0.1"}, False, id="behind a third proxy nobody trusts"),
        pytest.param({}, {"Origin": "https://evil.example"}, False, id="a foreign page"),
        pytest.param({}, {"Origin": "null"}, False, id="a page without an origin"),
        pytest.param({}, {"Origin": "http://[::1"}, False, id="an origin that cannot be parsed"),
        pytest.param({}, {"Host": "evil.example"}, False, id="a name that was made to point here"),
        pytest.param({"TRUSTED_PROXIES": PROXY}, {}, False, id="the proxy itself"),
        pytest.param({"TRUSTED_PROXIES": PROXY}, {"X-Forwarded-For": "127.0.0.2"}, False, id="local, by a proxy"),
        pytest.param({"TRUSTED_PROXIES": PROXY}, {"X-Forwarded-For": REMOTE}, False, id="remote, by a proxy"),
        pytest.param(
            {"TRUSTED_PROXIES": PROXY},
            {"X-Forwarded-For": f"127.0.0.1, {REMOTE}"},
            False,
            id="remote, pretending to be local",
        ),
        pytest.param(
            {"TRUSTED_PROXIES": PROXY},
            {"X-Forwarded-For": f"{REMOTE}, 127.0.0.1"},
            False,
            id="remote, by two proxies",
        ),
        pytest.param(
            {"TRUSTED_PROXIES": PROXY}, {"X-Real-IP": REMOTE}, False, id="remote, by a proxy that says X-Real-IP"
        ),
        pytest.param(
            {"TRUSTED_PROXIES": PROXY}, {"Forwarded": f"for={REMOTE}"}, False, id="remote, by one that says Forwarded"
        ),
        pytest.param({"AUTH": "none"}, {"X-Forwarded-For": REMOTE}, True, id="anybody, if none is asked for"),
        pytest.param({"AUTH": "none"}, {"Origin": "SELF"}, True, id="our own page, if none is asked for"),
        pytest.param({"AUTH": "none"}, {"Origin": "https://evil.example"}, False, id="a foreign page even then"),
    ],
)
async def test_auth_and_origin_decide_who_may_use_a_configured_model(
    space: Space, config: Config, variables: dict[str, str], headers: dict[str, str], may: bool
) -> None:
    space.source("paid", documents=[Document(title="Doc", content="Paid for.")], token="sat-1")
    path = config(
        f"models: {{writer: {{url: '{space.url}', slug: scribe}}}}\n"
        f"sources: {{shelf: {{url: '{space.url}', slug: paid, token: sat-1}}}}"
    )
    named = {"prompt": PROMPT, "model": {"url": "", "slug": "writer"}, "data_sources": [{"url": "", "slug": "shelf"}]}
    async with served(CONFIG=str(path), ENDPOINT_ALLOWLIST="", **variables) as server:
        sent = {name: value.replace("SELF", server.url) for name, value in headers.items()}
        status, answer, _ = await server.post("/api/v1/chat", named, headers=sent)
    if may:
        assert (status, answer.get("response")) == (200, "Paid for [paid].")
    else:
        assert (status, answer["error"]) == (422, "invalid_request")
        assert not space.requests


@pytest.mark.parametrize(
    ("proxies", "forwarded", "client"),
    [
        ("", None, "127.0.0.1"),
        ("", REMOTE, "127.0.0.1"),
        ("10.0.0.0/8", REMOTE, "127.0.0.1"),
        (PROXY, REMOTE, REMOTE),
        (LOCAL, f"198.51.100.7, {REMOTE}, 127.0.0.5", REMOTE),
        ('["::1", "127.0.0.1"]', "2001:db8::1", "2001:db8::1"),
    ],
)
async def test_trusted_proxies_decide_the_client_address_in_the_log(
    space: Space, log: Callable[[], str], proxies: str, forwarded: str | None, client: str
) -> None:
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    async with served(TRUSTED_PROXIES=proxies, LOG_LEVEL="INFO", ENDPOINT_ALLOWLIST_PUBLIC="true") as server:
        status, _, _ = await server.post("/api/v1/chat", body(space, "docs"), headers=headers)
        assert status == 200
        await space.wait_for(lambda: "chat_request_completed" in log())
    lines = [json.loads(line) for line in log().splitlines()]
    assert [line["client"] for line in lines if line["event"] == "chat_request_started"] == [client]
