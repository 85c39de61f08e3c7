-- Projects, their secrets, their ticks and the files of each tick. A tick's place in its project (`sequence`,
-- `prev_tick_id`) is given in the transaction that commits it, together with the cached answer and the messages.
CREATE TABLE project (
    project_id   text        PRIMARY KEY,
    org_id       text        NOT NULL CHECK (org_id <> ''),
    tables       text[],
    sequence     bigint      NOT NULL DEFAULT 0 CHECK (sequence >= 0),
    head_tick_id text,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    revoked_at   timestamptz
);
CREATE INDEX project_of_org ON project (org_id);

-- `sealed` is encrypted; the id is part of the secret that the client sends, so that one row is compared and not all.
CREATE TABLE secret (
    secret_id  text        PRIMARY KEY,
    project_id text        NOT NULL REFERENCES project,
    sealed     bytea       NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz
);
CREATE INDEX secret_of_project ON secret (project_id);

CREATE TABLE tick (
    project_id      text        NOT NULL REFERENCES project,
    tick_id         text        NOT NULL CHECK (tick_id <> ''),
    org_id          text        NOT NULL,
    state           text        NOT NULL DEFAULT 'uploading'
                    CHECK (state IN ('uploading', 'finalizing', 'committed', 'failed')),
    attempt         integer     NOT NULL DEFAULT 0,
    lane_fence      bigint,
    generation      integer     NOT NULL DEFAULT 0,
    mode            text        CHECK (mode IN ('delta', 'full')),
    dt              text,
    manifest        jsonb,
    manifest_sha256 text,
    result          json,
    error           jsonb,
    sequence        bigint,
    prev_tick_id    text,
    commits         jsonb,
    bronze_key      text,
    bronze_etag     text,
    bronze_version  bigint,
    outbox_ids      bigint[]    NOT NULL DEFAULT '{}',
    part_count      integer     NOT NULL DEFAULT 0 CHECK (part_count >= 0),
    part_bytes      bigint      NOT NULL DEFAULT 0 CHECK (part_bytes >= 0),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    committed_at    timestamptz,
    PRIMARY KEY (project_id, tick_id),
    UNIQUE (project_id, sequence),
    CHECK ((state = 'committed') = (committed_at IS NOT NULL)),
    CHECK (state <> 'committed' OR (sequence IS NOT NULL AND result IS NOT NULL AND manifest_sha256 IS NOT NULL
           AND commits IS NOT NULL AND bronze_key IS NOT NULL AND bronze_etag IS NOT NULL))
);
-- A tick id is unique in the whole platform from the moment that its commit begins; before that anybody may try.
CREATE UNIQUE INDEX tick_taken ON tick (tick_id) WHERE state IN ('finalizing', 'committed');
CREATE INDEX tick_open ON tick (org_id, updated_at) WHERE state <> 'committed';
CREATE INDEX tick_committed ON tick (committed_at) WHERE state = 'committed';

-- Written last: a row means that the object is there, whole and checked. The key is of one attempt only, so that
-- removing one file can never remove the bytes of another.
CREATE TABLE part (
    project_id         text        NOT NULL,
    tick_id            text        NOT NULL,
    file_seq           integer     NOT NULL CHECK (file_seq >= 0),
    sha256             text        NOT NULL,
    bytes              bigint      NOT NULL,
    object_key         text        NOT NULL,
    row_count          bigint,
    uncompressed_bytes bigint,
    row_groups         integer,
    columns            jsonb,
    problem            text,
    received_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (project_id, tick_id, file_seq),
    FOREIGN KEY (project_id, tick_id) REFERENCES tick ON DELETE CASCADE
);

-- What each Delta table looks like since the last commit: a change of type is refused before Spark reads anything.
CREATE TABLE bronze_table (
    project_id text   NOT NULL REFERENCES project,
    name       text   NOT NULL,
    columns    jsonb  NOT NULL,
    version    bigint NOT NULL,
    PRIMARY KEY (project_id, name)
);

-- What people did to projects and ticks.
CREATE TABLE audit (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor   text        NOT NULL,
    action  text        NOT NULL,
    subject text        NOT NULL,
    details jsonb       NOT NULL DEFAULT '{}'
);

-- The coordination table as the original design names its columns, for people and their queries.
CREATE VIEW ticks AS
SELECT t.tick_id, t.project_id, t.org_id, t.state,
       coalesce((SELECT jsonb_object_agg(p.file_seq, jsonb_build_object(
                     'sha256', p.sha256, 'bytes', p.bytes, 'received_at', p.received_at))
                   FROM part AS p WHERE p.project_id = t.project_id AND p.tick_id = t.tick_id), '{}') AS parts_received,
       t.manifest, t.result, t.created_at, t.updated_at, t.committed_at
  FROM tick AS t;
