"""Commands over pivotrl/models: conversion and its verification."""
