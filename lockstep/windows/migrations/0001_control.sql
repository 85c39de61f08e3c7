-- Progress lives where the data lives: one row per vault, changed in the transaction of each window.
CREATE TABLE apply_control (
    vault       text        PRIMARY KEY CHECK (vault <> ''),
    epoch       integer     NOT NULL CHECK (epoch > 0),
    watermark   timestamptz NOT NULL,
    fence       bigint      NOT NULL DEFAULT 0 CHECK (fence >= 0),
    owner       text,
    lease_until timestamptz,
    opened_by   text        NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What was applied, in the transaction that applied it. The unique start makes two windows from one point impossible.
CREATE TABLE applied_window (
    vault      text        NOT NULL,
    epoch      integer     NOT NULL,
    kind       text        NOT NULL CHECK (kind IN ('incremental', 'full', 'log', 'gap')),
    start      timestamptz NOT NULL,
    stop       timestamptz NOT NULL CHECK (stop > start),
    load_id    text        NOT NULL,
    fence      bigint      NOT NULL,
    rows       bigint      NOT NULL CHECK (rows >= 0),
    counts     jsonb       NOT NULL,
    sha256     text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (vault, epoch, kind, stop)
);
CREATE UNIQUE INDEX applied_window_chain ON applied_window (vault, epoch, start) WHERE kind IN ('incremental', 'gap');

-- Who did what, when and why. Append only.
CREATE TABLE audit (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor   text        NOT NULL,
    action  text        NOT NULL,
    vault   text        NOT NULL,
    stop    timestamptz,
    reason  text        NOT NULL DEFAULT '',
    detail  jsonb       NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_vault ON audit (vault, at);
