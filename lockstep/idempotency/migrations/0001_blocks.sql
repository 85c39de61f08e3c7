-- One row for each unit that a transactional writer applied, written in the transaction that applied it.
CREATE TABLE ledger (
    pipeline   text        NOT NULL,
    unit       text        NOT NULL,
    generation integer     NOT NULL CHECK (generation >= 1),
    run        text        NOT NULL,
    content    text        NOT NULL,
    row_count  bigint      NOT NULL CHECK (row_count >= 0),
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (pipeline, unit, generation)
);

-- Staging tables that tasks write into; a row without a table, or the other way round, cannot exist.
CREATE TABLE staging (
    name       text        PRIMARY KEY,
    target     text        NOT NULL,
    run        text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The physical tables behind a dataset of the metadata cleaner: one for each interval, or one for several frozen ones.
CREATE TABLE unit (
    dataset    text        NOT NULL,
    name       text        NOT NULL,
    starts     date        NOT NULL,
    ends       date        NOT NULL,
    frozen     boolean     NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (dataset, name),
    UNIQUE (dataset, starts) DEFERRABLE INITIALLY DEFERRED,
    CHECK (ends > starts)
);

-- Which partitions of a unit are loaded: a partition that is loaded twice is seen before it doubles anything.
CREATE TABLE unit_partition (
    dataset   text        NOT NULL,
    name      text        NOT NULL,
    day       date        NOT NULL,
    run       text        NOT NULL,
    row_count bigint      NOT NULL,
    loaded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (dataset, day),
    FOREIGN KEY (dataset, name) REFERENCES unit ON DELETE CASCADE ON UPDATE CASCADE
);

-- Versions behind a proxy's stable name, and every move of the name.
CREATE TABLE proxy_version (
    proxy        text        NOT NULL,
    version      text        NOT NULL,
    logical_date text        NOT NULL,
    run          text        NOT NULL,
    sealed_at    timestamptz,
    dropped_at   timestamptz,
    PRIMARY KEY (proxy, version)
);
CREATE TABLE proxy_move (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    proxy    text        NOT NULL,
    version  text        NOT NULL,
    reason   text        NOT NULL,
    moved_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (proxy, version) REFERENCES proxy_version
);
CREATE INDEX proxy_move_latest ON proxy_move (proxy, id DESC);
