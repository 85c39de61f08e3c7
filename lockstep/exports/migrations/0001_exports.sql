-- Export jobs, their chunks, the files that exist, and who may ask. The chunk table is the queue: `fence` counts claims
-- and is part of every condition that a worker writes under; SQS messages are hints.
CREATE TABLE client (
    client_id      text        PRIMARY KEY,
    name           text        NOT NULL CHECK (name <> ''),
    tenant         text        NOT NULL,
    key_sha256     bytea       NOT NULL,
    webhook_secret text        NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at     timestamptz
);
CREATE UNIQUE INDEX client_active_name ON client (name) WHERE revoked_at IS NULL;

-- One number for all days: the day in a job id is read in the statement that draws the number, so midnight cannot
-- give two jobs one id.
CREATE SEQUENCE job_number;

CREATE TABLE job (
    job_id             varchar     PRIMARY KEY,
    number             bigint      NOT NULL UNIQUE,
    client_id          text        NOT NULL REFERENCES client,
    tenant             text        NOT NULL,
    status             varchar     NOT NULL DEFAULT 'SUBMITTED'
                       CHECK (status IN ('SUBMITTED', 'IN_PROGRESS', 'COMPLETED', 'FAILED', 'CANCELLED')),
    cancel_requested   boolean     NOT NULL DEFAULT false,
    request_json       jsonb       NOT NULL,
    created_at         timestamptz NOT NULL,
    updated_at         timestamptz NOT NULL,
    started_at         timestamptz,
    completed_at       timestamptz,
    as_of              timestamptz NOT NULL,
    reuse_window_days  integer     NOT NULL,
    max_age_seconds    bigint,
    force              boolean     NOT NULL,
    format             text        NOT NULL,
    formula_guard      text        NOT NULL,
    s3_base_path       text        NOT NULL,
    webhook_url        text,
    duplicates_removed integer     NOT NULL,
    error_message      text,
    total              integer     NOT NULL,
    pending            integer     NOT NULL,
    running            integer     NOT NULL DEFAULT 0,
    done               integer     NOT NULL DEFAULT 0,
    failed             integer     NOT NULL DEFAULT 0,
    generated          integer     NOT NULL DEFAULT 0,
    reused             integer     NOT NULL DEFAULT 0,
    row_total          bigint      NOT NULL DEFAULT 0,
    byte_total         bigint      NOT NULL DEFAULT 0,
    version            bigint      NOT NULL DEFAULT 1,
    -- A counter that does not add up would finish a job early or never: better no commit than that.
    CHECK (total > 0 AND pending >= 0 AND running >= 0 AND done >= 0 AND failed >= 0),
    CHECK (pending + running + done + failed = total),
    CHECK (generated + reused = done)
);
CREATE INDEX job_status ON job (status);
CREATE INDEX job_created_at ON job (created_at);
CREATE INDEX job_of_client ON job (client_id, number DESC);
CREATE INDEX job_active ON job (number) WHERE status IN ('SUBMITTED', 'IN_PROGRESS');

CREATE TABLE job_chunk (
    job_id         varchar     NOT NULL REFERENCES job ON DELETE CASCADE,
    chunk_key      varchar     NOT NULL,
    ordinal        integer     NOT NULL,
    key            varchar     NOT NULL,
    effective_date date        NOT NULL,
    file_id        text        NOT NULL,
    reuse_allowed  boolean     NOT NULL,
    status         varchar     NOT NULL DEFAULT 'PENDING' CHECK (status IN ('PENDING', 'RUNNING', 'DONE', 'FAILED')),
    attempts       integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    fence          bigint      NOT NULL DEFAULT 0,
    run_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    batch_id       text,
    reserved_until timestamptz,
    locked_at      timestamptz,
    lock_owner     varchar,
    lease_until    timestamptz,
    rows_so_far    bigint      NOT NULL DEFAULT 0,
    started_at     timestamptz,
    completed_at   timestamptz,
    s3_object_key  text,
    row_count      bigint,
    bytes          bigint,
    sha256         text,
    etag           text,
    version_id     text,
    generation     bigint,
    as_of          timestamptz,
    columns        jsonb,
    reused         boolean     NOT NULL DEFAULT false,
    error_message  text,
    PRIMARY KEY (job_id, chunk_key),
    CHECK ((status = 'RUNNING') = (lease_until IS NOT NULL)),
    CHECK (status <> 'DONE' OR (sha256 IS NOT NULL AND row_count IS NOT NULL AND generation IS NOT NULL))
);
CREATE INDEX job_chunk_status ON job_chunk (job_id, status);
CREATE INDEX job_chunk_key_date ON job_chunk (key, effective_date);
CREATE INDEX job_chunk_waiting ON job_chunk (job_id, ordinal) WHERE status = 'PENDING';
CREATE INDEX job_chunk_batch ON job_chunk (batch_id, ordinal) WHERE status = 'PENDING' AND batch_id IS NOT NULL;
CREATE INDEX job_chunk_lease ON job_chunk (lease_until) WHERE status = 'RUNNING';
CREATE INDEX job_chunk_file_waiting ON job_chunk (file_id) WHERE status = 'PENDING';
-- Single flight: whatever the claims do, two workers never build one file at the same time.
CREATE UNIQUE INDEX job_chunk_one_builder ON job_chunk (file_id) WHERE status = 'RUNNING';

CREATE TABLE file_cache (
    file_id           text        PRIMARY KEY,
    tenant            text        NOT NULL,
    key               varchar     NOT NULL,
    effective_date    date        NOT NULL,
    format            text        NOT NULL,
    formula_guard     text        NOT NULL,
    schema_version    text        NOT NULL,
    s3_object_key     text        NOT NULL,
    row_count         bigint      NOT NULL,
    bytes             bigint      NOT NULL,
    sha256            text        NOT NULL,
    etag              text        NOT NULL,
    version_id        text,
    generation        bigint      NOT NULL,
    as_of             timestamptz NOT NULL,
    columns           jsonb       NOT NULL,
    created_at        timestamptz NOT NULL,
    last_generated_at timestamptz NOT NULL,
    UNIQUE (tenant, key, effective_date, format, formula_guard)
);
CREATE INDEX file_cache_age ON file_cache (last_generated_at);

CREATE TABLE idempotency (
    client_id       text        NOT NULL REFERENCES client,
    idempotency_key text        NOT NULL,
    request_sha256  text        NOT NULL,
    job_id          varchar     NOT NULL REFERENCES job ON DELETE CASCADE,
    answer          json        NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (client_id, idempotency_key)
);
CREATE INDEX idempotency_age ON idempotency (created_at);

-- What is broken around the chunks, shared by all workers, so that an outage costs time and not attempts.
CREATE TABLE breaker (
    part       text        PRIMARY KEY,
    failures   integer     NOT NULL,
    open_until timestamptz NOT NULL,
    last_error text        NOT NULL
);
